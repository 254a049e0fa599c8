"""Codes of cached keys that keep the scores of the queries to come, instead of the nearest ones.

    minimise over u_j in {0 ... 2^b - 1}^D      (k'_j - k_j)ᵀ (M / m + damping I) (k'_j - k_j)      k'_j = s u_j + a
    by coordinate descent from the nearest codes: u_c <- round(clamp(u_c - g_c / (s_c H_cc), 0, 2^b - 1)),  g = H (k'_j - k_j)

Shapes:  x [B, H, L, D]   order int64 [B, N], count int [B]: the chosen tokens, as in kv_pack   moment [H, D, D]: M = E[q qᵀ] of
         the queries of a KV head, m its mean diagonal   words, scale and offset as kv_pack's by channel
Why:     a score's error is qᵀ (k' - k), and queries are far from isotropic; at 1 bit the error per channel cannot be helped, but
         its direction can.  V has no such partner.  Not in the paper; what AdaRound and GPTQ do to weights, done to keys.
Exact:   the ranges are kv_pack's by channel, narrowed by ``shrink``; ties round to even.  No sweep makes the sum larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.divide import divided
from mmqc.ops.kv_pack import check as check_places
from mmqc.ops.kv_pack import chosen, ranges
from mmqc.ops.kv_pack import fake as fake_pack
from mmqc.ops.kv_words import pack_words

SWEEPS, DAMPING = 2, 0.3


def check(x: Tensor, order: Tensor, count: Tensor, moment: Tensor, bits: int) -> None:
    """Raise unless the operands fit each other."""
    check_places(x, order, count, bits, "channel", False)
    if moment.shape != (x.shape[1], x.shape[3], x.shape[3]):
        raise ValueError(f"moment is [H, D, D] for x {list(x.shape)}, not {list(moment.shape)}")


def weighting(moment: Tensor, damping: float, dtype: torch.dtype) -> Tensor:
    """H = M / m + damping I, [H, D, D] in ``dtype``."""
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1).to(dtype).clamp(min=torch.finfo(torch.float32).tiny)
    identity = torch.eye(moment.shape[2], dtype=dtype, device=moment.device)
    return moment.to(dtype) / mean[:, None, None] + damping * identity


def reference(
    x: Tensor, order: Tensor, count: Tensor, moment: Tensor, bits: int, shrink: float, damping: float, sweeps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The descent, all tokens at once."""
    check(x, order, count, moment, bits)
    wide = torch.promote_types(x.dtype, torch.float32)
    k, top = chosen(x, order).to(wide), 2**bits - 1
    used = (torch.arange(order.shape[1], device=x.device) < count[:, None])[:, None, :, None]
    low, high = ranges(k, used, "channel")
    centre, half = (low + high) / 2, (high - low) * (shrink / 2)
    offset = torch.where(high > low, centre - half, low)
    scale = torch.where(high > low, divided(2 * half, top), 1.0)
    h = weighting(moment, damping, wide)
    u = torch.round(((k - offset) / scale).clamp(0, top))
    slope = ((u * scale + offset - k) * used) @ h
    for c in [*range(x.shape[3])] * sweeps:
        step = scale[..., c]
        better = torch.round((u[..., c] - slope[..., c] / (step * h[:, c, c, None])).clamp(0, top))
        slope += ((better - u[..., c]) * step)[..., None] * h[:, None, c]
        u[..., c] = better
    return pack_words(torch.where(used, u, 0.0), bits).contiguous(), scale.contiguous(), offset.contiguous()


def fake(
    x: Tensor, order: Tensor, count: Tensor, moment: Tensor, bits: int, shrink: float, damping: float, sweeps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Words and ranges without their values."""
    del damping, sweeps
    check(x, order, count, moment, bits)
    return fake_pack(x, order, count, bits, "channel", shrink, False)


define(
    "kv_round_keys(Tensor x, Tensor order, Tensor count, Tensor moment, int bits, float shrink, float damping, int sweeps) "
    "-> (Tensor, Tensor, Tensor)",
    reference,
    fake,
)
