"""Attention of new queries to a cache of packed visual tokens and plain text tokens.

    x_j  = t ((q . s_K) u_j + q a_K)                  visual scores, t = scaling: K's scale and offset are moved onto q
    g(x) = (x - c) max(d - c + tau1 - tau2, 0) / (d - c) + c - tau1             [c, d]: the range of x over the visual tokens
    p    = softmax([g(x), t q k_text])
    y    = s_V . (p_visual u_V) + a_V sum(p_visual) + p_text v_text             V's are moved onto the output

Shapes:  q [B, H_q, Q, D]   k_words int16 [B, H, R, D]   v_words int16 [B, H, D_v, R] (kv_words.py)
         k_scale, k_offset [B, H, 1, D]   v_scale, v_offset [B, H, 1, D_v] or [B, H, N', 1]: a scale per token
         visual_count int32 [B]: tokens of the packed part that exist   k_text [B, H, T, D]   v_text [B, H, T, D_v]
         text_count int32 [B]   y [B, H_q, Q, D_v] in q's dtype   lse float32 [B, H_q, Q]: log sum exp of all scores
         Query head i reads KV head i // (H_q / H).  Every query sees every cached token.
Guard:   where the visual scores span less than tau2 - tau1, g is constant instead of turning their order round.  A range of
         nothing maps to c - tau1.  With tau1 = tau2 = 0, g(x) = x and nothing is rounded.
Exact:   float32 sums (float64 for float64 q); a sequence without any cached token gives y = 0, lse = -inf.
Source:  CalibQuant, arXiv:2502.14882, equations 6 to 8; the guard is not in the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.kv_words import check_bits, check_width, unpack_words


def check(q: Tensor, k_words: Tensor, v_words: Tensor, k_text: Tensor, v_text: Tensor, bits: int) -> None:
    """Raise unless the operands fit each other."""
    check_bits(bits)
    check_width(v_words.shape[2], bits)
    heads = k_words.shape[1]
    if q.shape[1] % heads or k_words.shape[3] != q.shape[3] or k_words.shape[2] != v_words.shape[3]:
        shapes = [list(t.shape) for t in (q, k_words, v_words)]
        raise ValueError(f"q [B, H_q, Q, D], k_words [B, H, R, D] and v_words [B, H, D_v, R] do not fit: {shapes}")
    if k_text.shape[:2] != k_words.shape[:2] or k_text.shape[:3] != v_text.shape[:3]:
        raise ValueError(f"k_text and v_text are [B, H, T, D], not {list(k_text.shape)} and {list(v_text.shape)}")


def calibrate(scores: Tensor, used: Tensor, tau1: float, tau2: float) -> Tensor:
    """The map g over the last axis, of which the ``used`` entries count."""
    if tau1 == tau2 == 0:
        return scores
    low = scores.masked_fill(~used, torch.inf).amin(-1, keepdim=True)
    high = scores.masked_fill(~used, -torch.inf).amax(-1, keepdim=True)
    width = high - low
    slope = (width + (tau1 - tau2)).clamp(min=0) / width
    slope = torch.where(width > 0, slope, 0.0)
    return torch.where(used, (scores - low) * slope + (low - tau1), scores)


def reference(
    q: Tensor,
    k_words: Tensor,
    v_words: Tensor,
    k_scale: Tensor,
    k_offset: Tensor,
    v_scale: Tensor,
    v_offset: Tensor,
    visual_count: Tensor,
    k_text: Tensor,
    v_text: Tensor,
    text_count: Tensor,
    bits: int,
    scaling: float,
    tau1: float,
    tau2: float,
) -> tuple[Tensor, Tensor]:
    """The formula."""
    check(q, k_words, v_words, k_text, v_text, bits)
    (batch, q_heads, length, _), heads = q.shape, k_words.shape[1]
    wide, last = torch.promote_types(q.dtype, torch.float32), v_words.shape[2]
    rows = q.reshape(batch, heads, -1, q.shape[3]).to(wide)  # [B, H, G Q, D]: the queries of a KV head side by side
    u_k, u_v = unpack_words(k_words, bits).to(wide), unpack_words(v_words, bits, True).to(wide)
    visual, text = (
        (torch.arange(t.shape[2], device=q.device) < n[:, None])[:, None, None, :]
        for t, n in ((u_k, visual_count), (k_text, text_count))
    )
    scores = scaling * ((rows * k_scale.to(wide)) @ u_k.mT + (rows * k_offset.to(wide)).sum(-1, keepdim=True))
    scores = calibrate(scores, visual, tau1, tau2).masked_fill(~visual, -torch.inf)
    plain = (scaling * (rows @ k_text.to(wide).mT)).masked_fill(~text, -torch.inf)
    both = torch.cat((scores, plain), -1)
    top = both.amax(-1, keepdim=True) if both.shape[-1] else both.new_full((*both.shape[:-1], 1), -torch.inf)
    p = torch.exp(both - torch.where(top.isfinite(), top, 0.0))
    total = p.sum(-1, keepdim=True)
    p, p_text = p.split((u_k.shape[2], k_text.shape[2]), -1)
    if per_token(v_scale, v_words):
        y = (p * v_scale.to(wide).mT) @ u_v + (p * v_offset.to(wide).mT).sum(-1, keepdim=True)
    else:
        y = (p @ u_v) * v_scale.to(wide) + p.sum(-1, keepdim=True) * v_offset.to(wide)
    stored = v_text.to(wide).masked_fill(~text.mT, 0.0)  # what nobody wrote may be NaN
    y = torch.where(total > 0, (y + p_text @ stored) / total, 0.0)
    lse = torch.where(total > 0, top + total.log(), -torch.inf).to(torch.float32)
    return y.reshape(batch, q_heads, length, last).to(q.dtype), lse.reshape(batch, q_heads, length)


def per_token(v_scale: Tensor, v_words: Tensor) -> bool:
    """Whether values have a scale per token: its shape says so."""
    return v_scale.shape[3] == 1 and v_words.shape[2] != 1


def fake(
    q: Tensor,
    k_words: Tensor,
    v_words: Tensor,
    k_scale: Tensor,
    k_offset: Tensor,
    v_scale: Tensor,
    v_offset: Tensor,
    visual_count: Tensor,
    k_text: Tensor,
    v_text: Tensor,
    text_count: Tensor,
    bits: int,
    scaling: float,
    tau1: float,
    tau2: float,
) -> tuple[Tensor, Tensor]:
    """[B, H_q, Q, D_v] in q's dtype, and [B, H_q, Q]."""
    del k_scale, k_offset, v_scale, v_offset, visual_count, text_count, scaling, tau1, tau2
    check(q, k_words, v_words, k_text, v_text, bits)
    return q.new_empty((*q.shape[:3], v_words.shape[2])), q.new_empty(q.shape[:3], dtype=torch.float32)


define(
    "kv_attention(Tensor q, Tensor k_words, Tensor v_words, Tensor k_scale, Tensor k_offset, Tensor v_scale, "
    "Tensor v_offset, Tensor visual_count, Tensor k_text, Tensor v_text, Tensor text_count, int bits, float scaling, "
    "float tau1, float tau2) -> (Tensor, Tensor)",
    reference,
    fake,
)
