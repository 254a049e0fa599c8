"""Inboxes of ranks that share this process, and what the others are to have sent (kernels/rows/all_reduce.py)."""

from __future__ import annotations

import torch

from mmqc.kernels.shared.inboxes import Inboxes

ROWS = 3


def inboxes(ranks: int, width: int) -> list[Inboxes]:
    """Of ranks that share this process."""
    memory = torch.zeros(ranks, 2, ranks, ROWS, width, dtype=torch.int32)
    peers = torch.tensor([m.data_ptr() for m in memory])
    return [Inboxes(peers, torch.zeros(ROWS, dtype=torch.int32), r, ROWS, width, memory[r]) for r in range(ranks)]


def words(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x.view(torch.int16).int() & 0xFFFF) | (count << 16)


def send(x: torch.Tensor, sender: int, to: Inboxes) -> None:
    """What ``sender``'s kernel writes."""
    for row, count in enumerate(to.counts[: len(x)].tolist()):
        to.mine[(count + 1) & 1, sender, row] = words(x[row], count + 1)
