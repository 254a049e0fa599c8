"""Dynamic asymmetric quantization: one scale per token and part of the channels (ResQ, arXiv:2412.14363, equations 1 and 2).

    s = (max x - min x) / (2^b - 1)        q = round((x - min x) / s) - 2^(b-1)        o = min x + 2^(b-1) s
    x ≈ s q + o                            every part p of the channels has its own b, s and o
    s_p >= s_(p-1) 2^(b_(p-1) - b_p - 1)   a part's step next to the one before it: as fine as the bits say, or one bit finer

Shapes:  x [..., K]   order int64 [K] or none: the channels, part after part   widths, bits: one entry a part, sum(widths) = K
         q int8 [..., K], in the order of the parts   s, o [..., P] in float32 (float64 for a float64 x)
Error:   round half to even; |e| <= s / 2; a token whose part is constant has no error, and s = 0 where nothing bounds it below.
Why:     the bound changes no token whose parts have ranges of one size, and lets an integer sum go on from one part's units to the
         next one's (ops/mixed_matmul.py); finer steps would add nothing next to the other part's error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.divide import divided


def check_parts(width: int, widths: Sequence[int], bits: Sequence[int]) -> None:
    """Raise unless the parts make up the channels."""
    if len(widths) != len(bits) or not widths or min(widths) < 1 or sum(widths) != width:
        raise ValueError(f"widths = {list(widths)} with bits = {list(bits)} are no parts of {width} channels")
    if not all(2 <= b <= 8 for b in bits):
        raise ValueError(f"bits = {list(bits)}: activations have 2 to 8 bits")


def finest(bits: int, next_bits: int) -> float:
    """The least step of a part, in steps of the part before it."""
    return 2.0 ** (bits - next_bits - 1)


def reference(x: Tensor, order: Tensor | None, widths: Sequence[int], bits: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Part after part, in float32 at least."""
    check_parts(x.shape[-1], widths, bits)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide if order is None else wide.index_select(-1, order)
    codes, scales, offsets = [], [], []
    for p, (part, b) in enumerate(zip(wide.split(list(widths), -1), bits, strict=True)):
        low, high = torch.aminmax(part, dim=-1, keepdim=True)
        s = divided(high - low, 2**b - 1)
        s = torch.maximum(s, scales[-1] * finest(bits[p - 1], b)) if p else s
        q = torch.round((part - low) / torch.where(s > 0, s, 1.0)).clamp(0, 2**b - 1) - 2 ** (b - 1)
        codes.append(q.to(torch.int8))
        scales.append(s)
        offsets.append(low + 2 ** (b - 1) * s)
    return torch.cat(codes, -1), torch.cat(scales, -1), torch.cat(offsets, -1)


def fake(x: Tensor, order: Tensor | None, widths: Sequence[int], bits: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes like x, and a scale and an offset for every part."""
    check_parts(x.shape[-1], widths, bits)
    if order is not None and order.shape != (x.shape[-1],):
        raise ValueError(f"order has shape [{x.shape[-1]}], not {list(order.shape)}")
    dtype, size = torch.promote_types(x.dtype, torch.float32), (*x.shape[:-1], len(widths))
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(size, dtype=dtype), x.new_empty(size, dtype=dtype)


define("quantize_per_token(Tensor x, Tensor? order, int[] widths, int[] bits) -> (Tensor, Tensor, Tensor)", reference, fake)
