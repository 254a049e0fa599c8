"""The sum over ranks behind a linear that they share, of few rows: on CUDA through memory that the ranks share.

    y = Σ_r x_r

Shapes:  x, y [..., D], equal on all ranks of the group
Where:   passes/rewrite_all_reduce.py puts it in place of the functional collective; elsewhere than on CUDA it is that one.
Exact:   the sum is rounded once, to x's dtype; all ranks get the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define


def reference(x: Tensor, group: str) -> Tensor:
    """By the group's backend."""
    import torch.distributed._functional_collectives

    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


def fake(x: Tensor, group: str) -> Tensor:
    """Like x."""
    del group
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define("all_reduce(Tensor x, str group) -> Tensor", reference, fake)
