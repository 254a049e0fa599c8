"""The inner loop of GPTQ: round the channels of one block one after the other, the later ones making up for each error.

    for i = 0 ... B-1:   q_i = clamp(round(w_i / s_i) + z_i)        e_i = (w_i - (q_i - z_i) s_i) / U_ii
                         w_j <- w_j - U_ij e_i   for all j > i

Shapes:  w [B, N], a channel a row   U [B, B] upper triangular   s [B, N] positive   z [B, N] integers, or None for 0
         q int8 [B, N]   e [B, N] in w's dtype
Source:  Frantar et al., arXiv:2210.17323, Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define


def check(w: Tensor, u: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> None:
    """Raise unless shapes and dtypes fit."""
    size = w.shape[0]
    if w.dim() != 2 or u.shape != (size, size) or scale.shape != w.shape or (zero is not None and zero.shape != w.shape):
        shapes = [list(t.shape) for t in (w, u, scale) if t is not None]
        raise ValueError(f"gptq_block: w, s and z are [B, N] and U [B, B]; got {shapes}")
    if any(t.dtype != w.dtype for t in (u, scale, zero) if t is not None) or not w.is_floating_point():
        raise ValueError("gptq_block: w, U, s and z have one floating-point dtype")
    if not 2 <= bits <= 8:
        raise ValueError(f"gptq_block: bits = {bits}: 2 to 8")


def reference(w: Tensor, u: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """The formula, channel by channel; ties to even."""
    check(w, u, scale, zero, bits)
    w, codes, errors = w.clone(), torch.empty_like(w, dtype=torch.int8), torch.empty_like(w)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for i in range(len(w)):
        q = torch.round(w[i] / scale[i])
        q = (q if zero is None else q + zero[i]).clamp_(low, high)
        codes[i] = q.to(torch.int8)
        value = (q if zero is None else q - zero[i]) * scale[i]
        errors[i] = (w[i] - value) / u[i, i]
        w[i + 1 :].addr_(u[i, i + 1 :], errors[i], alpha=-1)
    return codes, errors


def fake(w: Tensor, u: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and errors, shaped like w."""
    check(w, u, scale, zero, bits)
    return torch.empty_like(w, dtype=torch.int8), torch.empty_like(w)


define("gptq_block(Tensor w, Tensor u, Tensor scale, Tensor? zero, int bits) -> (Tensor, Tensor)", reference, fake)
