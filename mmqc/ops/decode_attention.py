"""Attention of rows that all see the same tokens of their head: one new token's query heads over a cache.

    y[b, h, r] = sum_t softmax_t(scale q[b, h, r] . k[b, h, t]) v[b, h, t]        over the tokens t that mask[b, t] allows

Shapes:  q [B, H, R, D]   k, v [B, H, S, D]   mask bool [B or 1, 1, 1, S], or None: every token   y [B, H, R, D], contiguous
Exact:   sums in float32 at least; a row that sees no token is zeros, as in ``scaled_dot_product_attention``
Why:     what a mask hides in front of the first and behind the last token that it shows is never read: a cache may have room, with
         anything in it, for tokens that have not come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """Raise unless the shapes are those of heads, and the mask is one for all rows."""
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q [B, H, R, D] attends to k, v [B, H, S, D], not {list(q.shape)} to {list(k.shape)}, {list(v.shape)}")
    if mask is None:
        return
    rows = (*mask.shape, 0, 0, 0, 0)[:4]
    if mask.dtype != torch.bool or mask.dim() != 4 or rows[0] not in (1, q.shape[0]) or rows[1:] != (1, 1, k.shape[2]):
        raise ValueError(f"mask is bool [B or 1, 1, 1, S = {k.shape[2]}], not {mask.dtype} {list(mask.shape)}")


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Scores, softmax, sum; hidden tokens are left out before they meet anything."""
    check(q, k, v, mask)
    kind = torch.promote_types(q.dtype, torch.float32)
    if mask is not None:
        seen = mask.transpose(2, 3)
        k, v = (torch.where(seen, x, 0) for x in (k, v))
    scores = q.to(kind) @ k.to(kind).transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    chances = scores.softmax(-1)
    if mask is not None:
        chances = chances.masked_fill(~mask.any(-1, keepdim=True), 0)
    return (chances @ v.to(kind)).to(q.dtype)


def fake(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[B, H, R, D]; of sizes that are symbols, a graph is guarded for those that agree."""
    check(q, k, v, mask)
    del scale
    return q.new_empty(q.shape)


define("decode_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor", reference, fake)
