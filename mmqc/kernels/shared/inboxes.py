"""Memory in which the ranks of a host leave each other rows: what kernels/rows/all_reduce.py adds up by.

Allocated by torch's symmetric memory: a GPU stores to the others' over NVLink or PCIe.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmqc.kernels.shared.device_facts import INTERPRETED, why_not_here
from mmqc.kernels.shared.plan import first_reason, why_not_rows

DTYPES = (torch.float16, torch.bfloat16)
MAX_RANKS = 8


class Inboxes(NamedTuple):
    """Memory for messages between the ranks of a host.

    Attributes:
        peers: int64 [ranks], addresses of the ranks' inboxes, int32 [2, ranks, rows, width] and zero at first.
        counts: int32 [rows], how often each row has been sent; zero at first.
        rank: whose these are.
        rows, width: of a message, at most, and exactly.
        mine: this rank's memory, which lives as long as this does.
        patience: how often an inbox is looked at, about once a microsecond, before what is due is given up.
    """

    peers: Tensor
    counts: Tensor
    rank: int
    rows: int
    width: int
    mine: Tensor
    patience: int = 4 if INTERPRETED else 1 << 29

    def why_not(self, x: Tensor) -> str | None:
        """None, or why the rows of x cannot be added up through them."""
        ranks = self.peers.shape[0]
        return why_not_rows(x) or first_reason((
            (x.dtype in DTYPES, f"x is one of {DTYPES}, not {x.dtype}"),
            (2 <= ranks <= MAX_RANKS, f"2 to {MAX_RANKS} ranks, not {ranks}"),
            (x.shape[0] <= self.rows, f"{x.shape[0]} rows: the inboxes have {self.rows}"),
            (x.shape[1] == self.width, f"rows of {x.shape[1]}: the inboxes have {self.width}"),
        )) or why_not_here(x, self.peers, self.counts)

    def args(self) -> dict[str, Any]:
        """Of a kernel that adds up."""
        return dict(peers_ptr=self.peers, count_ptr=self.counts, rank=self.rank)

    def constants(self) -> dict[str, Any]:
        """The same kernel's."""
        return dict(RANKS=self.peers.shape[0], ROWS=self.rows, PATIENCE=self.patience)


def inboxes(group: Any, rows: int, width: int, device: torch.device) -> Inboxes:
    """New ones; all ranks make them at the same place of their programs.

    Args:
        group: of torch.distributed, its ranks on GPUs of one host that reach each other's memory.
        rows: of a message, at most.
        width: numbers in a row.
        device: this rank's.

    Raises:
        RuntimeError: torch's, where the GPUs do not reach each other, or the build has no symmetric memory.
    """
    import torch.distributed._symmetric_memory as symmetric

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    mine = symmetric.empty(2 * ranks * rows * width, dtype=torch.int32, device=device)
    handle = symmetric.rendezvous(mine, group)
    mine.zero_()
    peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody sends before all are zero
    return Inboxes(peers, torch.zeros(rows, dtype=torch.int32, device=device), rank, rows, width, mine)
