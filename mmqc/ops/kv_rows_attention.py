"""Attention of a decode step to tokens that are stored as rows of bytes (ResQ's keys and values, kv_rows.py).

    x_j = t sum_p (s_K[j, p] (q_p · u_K[j, p]) + o_K[j, p] sum q_p)        t = scaling, parts p of the channels
    y_p = sum_j π_j s_V[j, p] u_V[j, p] + sum_j π_j o_V[j, p]              π = softmax(x)

Shapes:  q [B, H_q, Q, D], turned as the keys are   k_rows, v_rows uint8 [B, H, T, row_bytes]   y [B, H_q, Q, D] in q's dtype
         widths, bits: one entry a part, sum(widths) = D.  Query head i reads KV head i // (H_q / H).
         Every query sees every token.
Exact:   float32 sums (float64 for float64 q).  Unlike keys and values that are written out, none is rounded to q's dtype.
Why:     scales and offsets go onto scores and probabilities, one number a token: codes are multiplied as they are stored.
Source:  ResQ, arXiv:2412.14363, section 4.3, for what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.kv_rows import from_rows, row_bytes
from mmqc.ops.quantize_per_token import check_parts


def check(q: Tensor, k_rows: Tensor, v_rows: Tensor, widths: Sequence[int], bits: Sequence[int]) -> None:
    """Raise unless the rows hold heads of q's width."""
    check_parts(q.shape[-1], widths, bits)
    rows = (q.shape[0], k_rows.shape[1], k_rows.shape[2], row_bytes(widths, bits))
    for name, given in (("k_rows", k_rows), ("v_rows", v_rows)):
        if given.dtype != torch.uint8 or given.shape != rows:
            raise ValueError(f"{name} is uint8 {list(rows)}, not {given.dtype} {list(given.shape)}")
    if q.shape[1] % max(rows[1], 1) or not rows[1]:
        raise ValueError(f"{q.shape[1]} query heads do not share {rows[1]} KV heads evenly")


def reference(q: Tensor, k_rows: Tensor, v_rows: Tensor, widths: Sequence[int], bits: Sequence[int], scaling: float) -> Tensor:
    """The formula, part after part."""
    check(q, k_rows, v_rows, widths, bits)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.reshape(*k_rows.shape[:2], -1, q.shape[-1]).to(wide)  # those of a KV head side by side
    (k, k_scale, k_offset), (v, v_scale, v_offset) = (
        [t.to(wide) for t in from_rows(rows, widths, bits)] for rows in (k_rows, v_rows)
    )
    scores = queries.new_zeros(())
    for p, (q_p, k_p) in enumerate(zip(queries.split(list(widths), -1), k.split(list(widths), -1), strict=True)):
        s, o = k_scale[..., None, :, p], k_offset[..., None, :, p]
        scores = scores + s * (q_p @ k_p.mT) + o * q_p.sum(-1, keepdim=True)
    probabilities = (scaling * scores).softmax(-1)
    y = [
        (probabilities * v_scale[..., None, :, p]) @ v_p + probabilities @ v_offset[..., p, None]
        for p, v_p in enumerate(v.split(list(widths), -1))
    ]
    return torch.cat(y, -1).reshape(q.shape).to(q.dtype)


def fake(q: Tensor, k_rows: Tensor, v_rows: Tensor, widths: Sequence[int], bits: Sequence[int], scaling: float) -> Tensor:
    """Like q, contiguous."""
    del scaling
    check(q, k_rows, v_rows, widths, bits)
    return q.new_empty(q.shape)


define(
    "kv_rows_attention(Tensor q, Tensor k_rows, Tensor v_rows, int[] widths, int[] bits, float scaling) -> Tensor", reference, fake
)
