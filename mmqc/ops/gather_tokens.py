"""Tokens of every sequence in an order of its own.

    y[b, ..., i, ...] = x[b, ..., index[b, i], ...]          i, and index[b, i] in x, at ``axis``

Shapes:  x [B or 1, ...] with the tokens at ``axis`` >= 1 (negative: from the end)   index int64 [B, L']
         y like x, with B at axis 0 and L' at ``axis``.  An x of fewer than ``rank`` axes gets axes of size 1 in front.
Use:     with ``order`` of ``modality_order(visual, flat=False)`` into modality order, with ``inverse`` back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmqc.ops.define import define


def batched(x: Tensor, index: Tensor, axis: int, rank: int) -> tuple[Tensor, int]:
    """X with all its axes, and the axis of its tokens counted from the front."""
    if index.dim() != 2 or not 1 <= axis % max(rank, x.dim(), 1) < max(rank, x.dim()):
        raise ValueError(f"axis = {axis} is no axis of tokens of x {list(x.shape)}, or index is not [batch, length]")
    for _ in range(rank - x.dim()):
        x = x.unsqueeze(0)
    return x, axis % x.dim()


def spread(index: Tensor, x: Tensor, at: int) -> Tensor:
    """The index with x's axes, for ``torch.gather``."""
    size = [index.shape[0], *x.shape[1:at], index.shape[1], *x.shape[at + 1 :]]
    return index.reshape(index.shape[0], *[1] * (at - 1), index.shape[1], *[1] * (x.dim() - at - 1)).expand(size)


def reference(x: Tensor, index: Tensor, axis: int, rank: int = 0) -> Tensor:
    """One ``gather``."""
    x, at = batched(x, index, axis, rank)
    return x.expand(index.shape[0], *x.shape[1:]).gather(at, spread(index, x, at))


def fake(x: Tensor, index: Tensor, axis: int, rank: int = 0) -> Tensor:
    """X's sizes with those of the index."""
    x, at = batched(x, index, axis, rank)
    return x.new_empty((index.shape[0], *x.shape[1:at], index.shape[1], *x.shape[at + 1 :]))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
    del output
    x, index, axis, rank = inputs
    ctx.save_for_backward(index)
    ctx.size, ctx.axis, ctx.rank = x.shape, axis, rank


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (index,) = ctx.saved_tensors
    like, at = batched(grad.new_empty((1,)).expand(ctx.size), index, ctx.axis, ctx.rank)
    wide = grad.new_zeros((index.shape[0], *like.shape[1:]))
    wide = wide.scatter_add(at, spread(index, like, at), grad)
    return wide.sum_to_size(ctx.size), None, None, None


define("gather_tokens(Tensor x, Tensor index, int axis, int rank=0) -> Tensor", reference, fake)
torch.library.register_autograd("mmqc::gather_tokens", _backward, setup_context=_keep)
