"""Tensors without the dimensions that they are expanded along."""

from __future__ import annotations

from torch import Tensor


def dense(tensor: Tensor) -> Tensor:
    """The tensor with one index along each dimension that is expanded."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
