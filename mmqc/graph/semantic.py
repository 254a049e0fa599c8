"""The semantic operations that ``raise_ops`` writes into a program, as plain functions that FX treats as leaves.

Norms have unit scale here; gains and biases stay visible as ``mul`` and ``add`` nodes behind them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """X / rms(x) over the last axis; at least float32 inside, x's dtype outside."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_norm(x: Tensor, eps: float) -> Tensor:
    """(x - mean(x)) / std(x) over the last axis, without gain and bias."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], None, None, eps)


def remove_mean(x: Tensor, mean: Tensor) -> Tensor:
    """X - mean: an explicit op where a stream enters a fragment that needs it without mean."""
    return x - mean
