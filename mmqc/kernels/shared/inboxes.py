"""Memory in which the ranks of a host leave each other rows: what kernels/rows/all_reduce.py and all_reduce_many.py add up by.

    OPENED.open(group, widths, device)     by all ranks, when a model is shared: "", or why not
    OPENED.of(name, width)                 what the op finds by the name of its group

    words      int32 [2, ranks, rows, width]      of few rows: a number and a count in each word
    numbers    16 bits [2, ranks, slots, width]   of many: as they are, with
    flags      int32 [ranks, slots]               a count for each row

Allocated by torch's symmetric memory: a GPU stores to the others' over NVLink or PCIe.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmqc.kernels.shared.device_facts import INTERPRETED
from mmqc.kernels.shared.plan import MAX_ROW, first_reason

DTYPES = (torch.float16, torch.bfloat16)
MAX_RANKS = 8
FEW_BYTES = 1 << 19  # of a message that goes as words
SLOTS = 512  # for rows on their way at a time, where there are many: four for each multiprocessor of an H100


class Inboxes(NamedTuple):
    """Memory for messages between the ranks of a host.

    Attributes:
        peers: int64 [ranks], addresses of the ranks' memory, zero at first.
        counts: int32 [rows + slots], how often each row, and each slot, has been sent; zero at first.
        rank: whose these are.
        rows, width: of a message of few rows, at most, and exactly.
        slots: for messages of many rows; 0 where these are NCCL's, which sends fewer bytes with more than two ranks.
        mine: this rank's memory, int32, which lives as long as this does.
        patience: how often an inbox is looked at, about once a microsecond, before what is due is given up.
    """

    peers: Tensor
    counts: Tensor
    rank: int
    rows: int
    width: int
    slots: int
    mine: Tensor
    patience: int = 4 if INTERPRETED else 1 << 29

    def why_not(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """None, or why so many rows cannot be added up through them."""
        return first_reason((
            (dtype in DTYPES, f"numbers are of {' or '.join(map(str, DTYPES))}, not {dtype}"),
            (rows <= self.rows or self.slots > 0, f"{rows} rows of {width}, more than {self.rows}, are NCCL's"),
            (width == self.width, f"rows of {width}: the inboxes are for {self.width}"),
            (device == self.peers.device, f"a tensor on {device}: the inboxes are on {self.peers.device}"),
        ))

    def args(self) -> dict[str, Any]:
        """Of a kernel that adds up few rows."""
        return dict(peers_ptr=self.peers, count_ptr=self.counts, rank=self.rank)

    def constants(self) -> dict[str, Any]:
        """The same kernel's."""
        return dict(RANKS=self.peers.shape[0], ROWS=self.rows, PATIENCE=self.patience)

    def constants_of_many(self) -> dict[str, Any]:
        """Of a kernel that adds up many; places in bytes."""
        words, numbers, _ = parts(self.peers.shape[0], self.rows, self.width, self.slots)
        places = dict(COUNTS=self.rows, NUMBERS=4 * words, FLAGS=4 * (words + numbers))
        return dict(RANKS=self.peers.shape[0], SLOTS=self.slots, PATIENCE=self.patience, **places)


def parts(ranks: int, rows: int, width: int, slots: int) -> tuple[int, int, int]:
    """How many int32 words, numbers and flags take; numbers begin where 16 bytes do."""
    return -(-2 * ranks * rows * width // 4) * 4, -(-ranks * slots * width // 4) * 4, ranks * slots


def inboxes(group: Any, rows: int, width: int, device: torch.device, slots: int = SLOTS) -> Inboxes:
    """New ones; all ranks make them at the same place of their programs.

    Args:
        group: of torch.distributed, its ranks on GPUs of one host that reach each other's memory.
        rows: of a message that goes as words, at most.
        width: numbers in a row.
        device: this rank's.
        slots: for messages of many rows, between two ranks.

    Raises:
        RuntimeError: torch's, where the GPUs do not reach each other, or the build has no symmetric memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    slots = slots if ranks == 2 else 0
    mine = symmetric.empty(sum(parts(ranks, rows, width, slots)), dtype=torch.int32, device=device)
    handle = symmetric.rendezvous(mine, group)
    mine.zero_()
    peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody sends before all are zero
    return Inboxes(peers, torch.zeros(rows + slots, dtype=torch.int32, device=device), rank, rows, width, slots, mine)


class Opened:
    """The inboxes of this process, by the name of their group and by width; and why a group has none."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[str, int], Inboxes] = {}
        self.closed: dict[str, str] = {}

    def open(self, group: Any, widths: Iterable[int], device: torch.device) -> str:
        """Make those that are not there; why there are none, "" if there are.  All ranks of the group call it."""
        name = group.group_name
        if name not in self.closed:
            self.closed[name] = _why_no_memory(group, device)
        for width in sorted({w for w in widths if w <= MAX_ROW}):
            if not self.closed[name] and (name, width) not in self.boxes:
                try:
                    self.boxes[name, width] = inboxes(group, max(1, FEW_BYTES // (2 * width)), width, device)
                except RuntimeError as error:  # what a driver may say is open-ended; the report repeats it
                    self.closed[name] = f"no shared memory: {str(error).splitlines()[0][:200]}"
        return self.closed[name]

    def of(self, name: str, width: int) -> Inboxes | None:
        """Those for rows of ``width`` in the group of a name."""
        return self.boxes.get((name, width))

    def why_not(self, name: str, x: Tensor) -> str | None:
        """None, or why x [..., D], real or traced, is not added up through the inboxes of the group of a name.

        A number of rows that varies is judged by what it was when the graph was traced: the op looks at those that come.
        """
        *sizes, width = x.shape
        rows: Any = math.prod(sizes)
        rows = rows if isinstance(rows, int) else rows.node.hint
        if rows is None or not isinstance(width, int):
            return "its size is decided by data"
        box = self.of(name, width)
        if box is None:
            return self.closed.get(name) or f"no memory is shared for rows of {width}"
        return box.why_not(rows, width, x.dtype, x.device)


OPENED = Opened()


def _why_no_memory(group: Any, device: torch.device) -> str:
    """"", or the first reason of any rank."""
    from torch._C import _distributed_c10d as c10d

    reason = first_reason((
        (device.type == "cuda" and torch.version.hip is None, "its ranks are not on GPUs of NVIDIA's"),
        (hasattr(c10d, "_SymmetricMemory"), "this build of torch has no symmetric memory"),
        (dist.get_world_size(group) <= MAX_RANKS, f"more than {MAX_RANKS} ranks"),
    ))
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (reason, socket.gethostname()), group)
    hosts = {host for _, host in said}
    return next(filter(None, (why for why, _ in said)), "" if len(hosts) == 1 else f"its ranks are on {len(hosts)} hosts")
