"""The ops of caches on CUDA: importing this file registers the kernels; what they cannot take goes to the reference.

    mmqc::kv_pack, kv_attention, kv_round_keys, kv_token_attention, kv_rows_attention, decode_attention

``why_not_rounded`` and ``why_not_text`` say of a model, before it has a cache, whether ``kv_round_keys`` and
``kv_token_attention`` have kernels for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.kernels.kv import decode_attention as decode
from mmqc.kernels.kv import kv_attention as attention
from mmqc.kernels.kv import kv_pack as packing
from mmqc.kernels.kv import kv_round_keys as rounding
from mmqc.kernels.kv import kv_rows_attention as rows
from mmqc.kernels.kv import kv_token_attention as tokens
from mmqc.kernels.shared.plan import Refusal
from mmqc.ops import decode_attention as decode_op
from mmqc.ops import kv_attention as attention_op
from mmqc.ops import kv_pack as packing_op
from mmqc.ops import kv_round_keys as rounding_op
from mmqc.ops import kv_rows_attention as rows_op
from mmqc.ops import kv_token_attention as tokens_op
from mmqc.ops.define import use_on_cuda


def kv_pack(
    x: Tensor, order: Tensor, count: Tensor, bits: int, by: str, shrink: float, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmqc::kv_pack`` on CUDA."""
    packing_op.check(x, order, count, bits, by, transposed)
    x = x if x.stride(3) == 1 else x.contiguous()
    order = order.contiguous()
    given = (x, order, count, bits, by, shrink, transposed)
    found = packing.kv_pack(*given)
    return packing_op.reference(*given) if isinstance(found, Refusal) else found


def kv_attention(
    q: Tensor, k_words: Tensor, v_words: Tensor, k_scale: Tensor, k_offset: Tensor, v_scale: Tensor, v_offset: Tensor,
    visual_count: Tensor, k_text: Tensor, v_text: Tensor, text_count: Tensor, bits: int, scaling: float, tau1: float,
    tau2: float,
) -> tuple[Tensor, Tensor]:
    """``mmqc::kv_attention`` on CUDA."""
    attention_op.check(q, k_words, v_words, k_text, v_text, bits)
    given = (q, k_words, v_words, k_scale, k_offset, v_scale, v_offset, visual_count, k_text, v_text, text_count, bits, scaling,
             tau1, tau2)
    found = attention.kv_attention(*given)
    return attention_op.reference(*given) if isinstance(found, Refusal) else found


def why_not_rounded(dtype: torch.dtype, width: int) -> str | None:
    """None, or why keys of so many channels are rounded for queries by the reference."""
    return packing.why_not_keys(dtype, width)


def kv_round_keys(
    x: Tensor, order: Tensor, count: Tensor, moment: Tensor, bits: int, shrink: float, damping: float, sweeps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmqc::kv_round_keys`` on CUDA."""
    rounding_op.check(x, order, count, moment, bits)
    x = x if x.stride(3) == 1 else x.contiguous()
    order = order.contiguous()
    given = (x, order, count, moment, bits, shrink, damping, sweeps)
    found = rounding.kv_round_keys(*given)
    return rounding_op.reference(*given) if isinstance(found, Refusal) else found


def why_not_text(dtype: torch.dtype, width: int, bits: int, block: int) -> str | None:
    """None, or why rounded text is attended to by the reference."""
    return tokens.why_not_heads(dtype, width, bits, block)


def kv_token_attention(
    q: Tensor, k_codes: Tensor, k_scale: Tensor, k_offset: Tensor, v_codes: Tensor, v_scale: Tensor, v_offset: Tensor,
    count: Tensor, bits: int, scaling: float,
) -> tuple[Tensor, Tensor]:
    """``mmqc::kv_token_attention`` on CUDA."""
    q = q if q.stride(3) == 1 else q.contiguous()
    given = (q, k_codes, k_scale, k_offset, v_codes, v_scale, v_offset, count, bits, scaling)
    found = tokens.kv_token_attention(*given)
    return tokens_op.reference(*given) if isinstance(found, Refusal) else found


def kv_rows_attention(
    q: Tensor, k_rows: Tensor, v_rows: Tensor, widths: Sequence[int], bits: Sequence[int], scaling: float
) -> Tensor:
    """``mmqc::kv_rows_attention`` on CUDA."""
    given = (q if q.stride(3) == 1 else q.contiguous(), k_rows, v_rows, widths, bits, scaling)
    found = rows.kv_rows_attention(*given)
    return rows_op.reference(*given) if isinstance(found, Refusal) else found


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """``mmqc::decode_attention`` on CUDA."""
    found = decode.decode_attention(q, k, v, mask, scale)
    return decode_op.reference(q, k, v, mask, scale) if isinstance(found, Refusal) else found


for implementation in (kv_pack, kv_attention, kv_round_keys, kv_token_attention, kv_rows_attention, decode_attention):
    use_on_cuda(implementation)
