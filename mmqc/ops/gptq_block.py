"""The inner loop of GPTQ: round the channels of one block one after the other, the later ones making up for each error.

    for i = 0 ... B-1:   q_i = clamp(round(w_i / s_i + z_i - z'_i) + z'_i)        e_i = (w_i - (q_i - z_i) s_i) / U_ii
                         w_j <- w_j - U_ij e_i   for all j > i                    z' = round(z), which is z on most grids

With ``float4`` the codes are twice the nearest e2m1 number (float4.py) instead, s is half its step, and z is none.

Shapes:  w [B, N], a channel a row   U [B, B] upper triangular   s [B, N] positive   z [B, N] any numbers, or None for 0
         q int8 [B, N]   e [B, N] in w's dtype
Source:  Frantar et al., arXiv:2210.17323, Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.float4 import round_float4


def check(w: Tensor, u: Tensor, scale: Tensor, zero: Tensor | None, bits: int, float4: bool = False) -> None:
    """Raise unless shapes and dtypes fit."""
    size = w.shape[0]
    if w.dim() != 2 or u.shape != (size, size) or scale.shape != w.shape or (zero is not None and zero.shape != w.shape):
        shapes = [list(t.shape) for t in (w, u, scale) if t is not None]
        raise ValueError(f"gptq_block: w, s and z are [B, N] and U [B, B]; got {shapes}")
    if any(t.dtype != w.dtype for t in (u, scale, zero) if t is not None) or not w.is_floating_point():
        raise ValueError("gptq_block: w, U, s and z have one floating-point dtype")
    if not 2 <= bits <= 8:
        raise ValueError(f"gptq_block: bits = {bits}: 2 to 8")
    if float4 and (bits != 4 or zero is not None):
        raise ValueError("gptq_block: float4 is of 4 bits, without zero points")


def reference(w: Tensor, u: Tensor, scale: Tensor, zero: Tensor | None, bits: int, float4: bool = False) -> tuple[Tensor, Tensor]:
    """The formula, channel by channel; ties to even."""
    check(w, u, scale, zero, bits, float4)
    w, codes, errors = w.clone(), torch.empty_like(w, dtype=torch.int8), torch.empty_like(w)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    whole = None if zero is None else torch.round(zero)
    for i in range(len(w)):
        q = w[i] / scale[i]
        if float4:
            q = round_float4(q)
        else:
            q = torch.round(q) if zero is None or whole is None else torch.round(q + (zero[i] - whole[i])) + whole[i]
            q = q.clamp_(low, high)
        codes[i] = q.to(torch.int8)
        value = (q if zero is None else q - zero[i]) * scale[i]
        errors[i] = (w[i] - value) / u[i, i]
        w[i + 1 :].addr_(u[i, i + 1 :], errors[i], alpha=-1)
    return codes, errors


def fake(w: Tensor, u: Tensor, scale: Tensor, zero: Tensor | None, bits: int, float4: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and errors, shaped like w."""
    check(w, u, scale, zero, bits, float4)
    return torch.empty_like(w, dtype=torch.int8), torch.empty_like(w)


define(
    "gptq_block(Tensor w, Tensor u, Tensor scale, Tensor? zero, int bits, bool float4=False) -> (Tensor, Tensor)", reference, fake
)
