"""Rows of a whole batch in another order: batch and sequence are one axis.

    y[i, j, ...] = rows[index[i, j], ...]        rows = x flattened over its first two axes

Shapes:  x [B, L, ...]   index int64 [B', L'], numbers b L + l   y [B', L', ...]
Use:     with ``order`` [1, B L] of ``modality_order(visual, flat=True)`` into modality order, with ``inverse`` [B, L] back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmqc.ops.define import define


def check(x: Tensor, index: Tensor) -> None:
    """Raise unless x has rows and the index has two axes."""
    if x.dim() < 2 or index.dim() != 2:
        raise ValueError(f"x has at least 2 axes and index 2, not {x.dim()} and {index.dim()}")


def reference(x: Tensor, index: Tensor) -> Tensor:
    """One ``index_select``."""
    check(x, index)
    rows = x.reshape(-1, *x.shape[2:])
    return rows.index_select(0, index.reshape(-1)).reshape(*index.shape, *x.shape[2:])


def fake(x: Tensor, index: Tensor) -> Tensor:
    """[*index, ...]."""
    check(x, index)
    return x.new_empty((*index.shape, *x.shape[2:]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(inputs[1])
    ctx.size = inputs[0].shape


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (index,) = ctx.saved_tensors
    rows = grad.new_zeros((ctx.size[0] * ctx.size[1], *ctx.size[2:]))
    return rows.index_add(0, index.reshape(-1), grad.reshape(-1, *ctx.size[2:])).reshape(ctx.size), None


define("gather_rows(Tensor x, Tensor index) -> Tensor", reference, fake)
torch.library.register_autograd("mmqc::gather_rows", _backward, setup_context=_keep)
