"""Quantize and pack chosen tokens of a layer's keys or values.

    u[j, c] = round(clamp((x[order[j], c] - a) / s, 0, 2^b - 1))       s = (z - a) / (2^b - 1)
    [a, z]  = the range of the chosen tokens, narrowed about its centre to ``shrink`` times its width:
              per channel and KV head (by "channel"), per token and KV head ("token") or one for the sequence ("tensor")

Shapes:  x [B, H, L, D]   order int64 [B, N]: places in L, of which row b uses the first count[b]   count int [B]
         words int16 [B, H, R, D] of keys, transposed [B, H, D, R] of values (kv_words.py)
         scale, offset float32 [B, H, 1, D], by "token" [B, H, N', 1]: x is about u s + a
         (float64 for float64 x)
Exact:   float32 (float64), halves round to even.  A range of one value has s = 1, so that u s + a is that value; tokens past
         count are the code 0 and no part of the range.
Source:  CalibQuant, arXiv:2502.14882, equations 3 to 5.  Its code narrows the range at 1 bit, too, but towards zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmqc.ops.define import define
from mmqc.ops.divide import divided
from mmqc.ops.kv_words import check_bits, check_width, pack_words, tokens_per_word, words_for

AXES = ("channel", "token", "tensor")


def check(x: Tensor, order: Tensor, count: Tensor, bits: int, by: str, transposed: bool) -> None:
    """Raise unless the operands fit each other."""
    check_bits(bits)
    if by not in AXES:
        raise ValueError(f"by = {by!r}: one of {AXES}")
    if x.dim() != 4 or order.dim() != 2 or order.shape[0] != x.shape[0] or count.shape != x.shape[:1]:
        shapes = [list(t.shape) for t in (x, order, count)]
        raise ValueError(f"x is [B, H, L, D], order [B, N] and count [B], not {shapes}")
    if transposed:
        check_width(x.shape[3], bits)


def chosen(x: Tensor, order: Tensor) -> Tensor:
    """[B, H, N, D]: the tokens of x in their order."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def ranges(x: Tensor, used: Tensor, by: str) -> tuple[Tensor, Tensor]:
    """Lower and upper end of the used entries [B, 1, N, 1], of shape [B, H, 1, D] or, by token, [B, H, N, 1]."""
    infinite = torch.full((), torch.inf, dtype=x.dtype, device=x.device)
    axes = {"channel": (2,), "token": (3,), "tensor": (1, 2, 3)}[by]
    low = torch.where(used, x, infinite).amin(axes, keepdim=True)
    high = torch.where(used, x, -infinite).amax(axes, keepdim=True)
    some = ~(low > high)  # a range of NaN is one: it comes back as the offset
    low, high = torch.where(some, low, 0.0), torch.where(some, high, 0.0)
    shape = (*x.shape[:3], 1) if by == "token" else (*x.shape[:2], 1, x.shape[3])
    return low.expand(shape), high.expand(shape)


def reference(
    x: Tensor, order: Tensor, count: Tensor, bits: int, by: str, shrink: float, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather, find the ranges, round, pack."""
    check(x, order, count, bits, by, transposed)
    wide = torch.promote_types(x.dtype, torch.float32)
    x = chosen(x, order).to(wide)
    used = (torch.arange(order.shape[1], device=x.device) < count[:, None])[:, None, :, None]
    low, high = ranges(x, used, by)
    centre, half = (low + high) / 2, (high - low) * (shrink / 2)
    offset = torch.where(high > low, centre - half, low)
    scale = torch.where(high > low, divided(2 * half, 2**bits - 1), 1.0)
    codes = torch.round(((x - offset) / scale).clamp(0, 2**bits - 1))
    words = pack_words(torch.where(used, codes, 0.0), bits, transposed)
    if by == "token":  # one for every place in the words
        spare = (0, 0, 0, words_for(order.shape[1], bits) * tokens_per_word(bits) - order.shape[1])
        scale, offset = pad(scale, spare, value=1.0), pad(offset, spare)
    return words, scale.contiguous(), offset.contiguous()


def fake(
    x: Tensor, order: Tensor, count: Tensor, bits: int, by: str, shrink: float, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Words and ranges without their values."""
    del shrink
    check(x, order, count, bits, by, transposed)
    batch, heads, _, width = x.shape
    rows = words_for(order.shape[1], bits)
    tokens = rows * tokens_per_word(bits)
    words = x.new_empty((batch, heads, *((width, rows) if transposed else (rows, width))), dtype=torch.int16)
    wide = torch.promote_types(x.dtype, torch.float32)
    shape = (batch, heads, tokens, 1) if by == "token" else (batch, heads, 1, width)
    return words, x.new_empty(shape, dtype=wide), x.new_empty(shape, dtype=wide)


define(
    "kv_pack(Tensor x, Tensor order, Tensor count, int bits, str by, float shrink, bool transposed) -> (Tensor, Tensor, Tensor)",
    reference,
    fake,
)
