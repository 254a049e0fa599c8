"""Attention of new queries to tokens that are stored with a scale per token, head and block of channels (KIVI's values).

    x_j = t sum_c q_c (s_K[j, c/g] u_K[j, c] + a_K[j, c/g])       t = scaling, g = block
    y   = sum_j p_j (s_V u_V + a_V)_j        p = softmax(x)
    u   = round(clamp((x - a) / s, 0, 2^b - 1))     a = min over the block,  s = (max - a) / (2^b - 1), both in x's dtype

Shapes:  q [B, H_q, Q, D]   k_codes uint8 [B, H, T, D b/8]   k_scale, k_offset [B, H, T, D/g]   v_* likewise with D_v
         count int32 [B]: tokens that exist   y [B, H_q, Q, D_v] in q's dtype   lse float32 [B, H_q, Q]: log sum exp of x
         Query head i reads KV head i // (H_q / H).  Every query sees every token.
         8 bits: a byte is a channel; 4 bits: byte c holds channel c below and channel c + D/2 above.
Exact:   float32 sums (float64 for float64 q); a sequence without any token gives y = 0, lse = -inf.  A block of one value has
         s = 1.  a and s are rounded to x's dtype before the codes are found, so the codes make up for it.
Source:  KIVI, arXiv:2402.02750, section 3 (its values; here keys, too: a token is rounded once, and alone).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define

BITS = (4, 8)


def check_tokens(width: int, bits: int, block: int) -> None:
    """Raise unless heads of ``width`` channels can be stored so."""
    if bits not in BITS:
        raise ValueError(f"bits = {bits}: text tokens are stored with 4 or 8 bits")
    if block < 1 or width % block or width % 2:
        raise ValueError(f"block = {block}: heads of {width} channels are an even number of them, and whole blocks")


def quantize_tokens(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [..., D] -> codes uint8 [..., D bits/8], scale and offset [..., D/block] in x's dtype."""
    check_tokens(x.shape[-1], bits, block)
    wide = torch.promote_types(x.dtype, torch.float32)
    blocks = x.unflatten(-1, (-1, block))
    offset = blocks.amin(-1)
    width = blocks.amax(-1).to(wide) - offset.to(wide)
    scale = torch.where(width > 0, width / (2**bits - 1), 1.0).to(x.dtype)
    u = (blocks.to(wide) - offset[..., None].to(wide)) / scale[..., None].to(wide)
    u = u.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    if bits == 4:
        below, above = u.chunk(2, -1)
        u = below | above << 4
    return u, scale, offset


def dequantize_tokens(codes: Tensor, scale: Tensor, offset: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """What ``quantize_tokens`` made -> [..., D]."""
    u = torch.cat((codes & 15, codes >> 4), -1) if bits == 4 else codes
    blocks = u.to(dtype).unflatten(-1, (scale.shape[-1], -1))
    return (blocks * scale[..., None].to(dtype) + offset[..., None].to(dtype)).flatten(-2)


def reference(
    q: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_offset: Tensor,
    v_codes: Tensor,
    v_scale: Tensor,
    v_offset: Tensor,
    count: Tensor,
    bits: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """The formula."""
    (batch, q_heads, length, width), heads = q.shape, k_codes.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    k = dequantize_tokens(k_codes, k_scale, k_offset, bits, wide)
    v = dequantize_tokens(v_codes, v_scale, v_offset, bits, wide)
    there = (torch.arange(k.shape[2], device=q.device) < count[:, None])[:, None, None]
    rows = q.reshape(batch, heads, -1, width).to(wide)  # the queries of a KV head side by side
    scores = (scaling * (rows @ k.mT)).masked_fill(~there, -torch.inf)
    lse = scores.logsumexp(-1) if k.shape[2] else scores.new_full(scores.shape[:-1], -torch.inf)
    p = torch.exp(scores - torch.where(lse.isfinite(), lse, 0.0)[..., None])
    y = p @ v.masked_fill(~there.mT, 0.0)  # what nobody wrote may be NaN
    return y.reshape(batch, q_heads, length, -1).to(q.dtype), lse.reshape(batch, q_heads, length).to(torch.float32)


def fake(
    q: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_offset: Tensor,
    v_codes: Tensor,
    v_scale: Tensor,
    v_offset: Tensor,
    count: Tensor,
    bits: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """[B, H_q, Q, D_v] in q's dtype, and [B, H_q, Q]."""
    del k_codes, k_scale, k_offset, v_scale, v_offset, count, scaling
    shape = q.shape[:3]
    return q.new_empty((*shape, v_codes.shape[3] * 8 // bits)), q.new_empty(shape, dtype=torch.float32)


define(
    "kv_token_attention(Tensor q, Tensor k_codes, Tensor k_scale, Tensor k_offset, Tensor v_codes, Tensor v_scale, "
    "Tensor v_offset, Tensor count, int bits, float scaling) -> (Tensor, Tensor)",
    reference,
    fake,
)
