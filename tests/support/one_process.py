"""Inboxes of ranks that share this process, and what the others are to have sent (kernels/rows/all_reduce.py)."""

from __future__ import annotations

import torch

from mmqc.kernels.shared.inboxes import Inboxes, parts

ROWS, SLOTS = 3, 5


def inboxes(ranks: int, width: int) -> list[Inboxes]:
    """Of ranks that share this process."""
    slots = SLOTS if ranks == 2 else 0
    memory = torch.zeros(ranks, sum(parts(ranks, ROWS, width, slots)), dtype=torch.int32)
    peers = torch.tensor([m.data_ptr() for m in memory])
    counts = [torch.zeros(ROWS + slots, dtype=torch.int32) for _ in range(ranks)]
    return [Inboxes(peers, counts[r], r, ROWS, width, slots, memory[r]) for r in range(ranks)]


def words(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x.view(torch.int16).int() & 0xFFFF) | (count << 16)


def word_inbox(of: Inboxes) -> torch.Tensor:
    """Few rows [2, ranks, rows, width]."""
    return of.mine[: 2 * len(of.peers) * of.rows * of.width].view(2, len(of.peers), of.rows, of.width)


def slot_inbox(of: Inboxes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Many: numbers [2, ranks, slots, width] and flags [ranks, slots]."""
    start, size, flags = parts(len(of.peers), of.rows, of.width, of.slots)
    numbers = of.mine[start : start + len(of.peers) * of.slots * of.width].view(dtype)
    return numbers.view(2, len(of.peers), of.slots, of.width), of.mine[start + size :][:flags].view(len(of.peers), of.slots)


def send(x: torch.Tensor, sender: int, to: Inboxes) -> None:
    """What ``sender``'s kernel writes of few rows."""
    for row, count in enumerate(to.counts[: len(x)].tolist()):
        word_inbox(to)[(count + 1) & 1, sender, row] = words(x[row], count + 1)


def send_many(x: torch.Tensor, sender: int, to: Inboxes) -> None:
    """The same of many, of which a slot has two at most: what would be sent later is read in between."""
    assert to.rows < len(x) <= 2 * to.slots
    numbers, flags = slot_inbox(to, x.dtype)
    sent = to.counts[to.rows :].tolist()
    for row, numbers_of_row in enumerate(x):
        slot = row % to.slots
        sent[slot] += 1
        numbers[sent[slot] & 1, sender, slot] = numbers_of_row
        flags[sender, slot] = sent[slot]
