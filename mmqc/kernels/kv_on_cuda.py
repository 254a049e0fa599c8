"""kv_pack and kv_attention on CUDA: importing this file registers the kernels; what they cannot take goes to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.kernels import kv_attention as attention
from mmqc.kernels import kv_pack as packing
from mmqc.ops import kv_attention as attention_op
from mmqc.ops import kv_pack as packing_op


def kv_pack(
    x: Tensor, order: Tensor, count: Tensor, bits: int, by: str, shrink: float, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmqc::kv_pack`` on CUDA."""
    packing_op.check(x, order, count, bits, by, transposed)
    x = x if x.stride(3) == 1 else x.contiguous()
    order = order.contiguous()
    run = packing.kv_pack if packing.supports(x, order, count, by) is None else packing_op.reference
    return run(x, order, count, bits, by, shrink, transposed)


def kv_attention(
    q: Tensor, k_words: Tensor, v_words: Tensor, k_scale: Tensor, k_offset: Tensor, v_scale: Tensor, v_offset: Tensor,
    visual_count: Tensor, k_text: Tensor, v_text: Tensor, text_count: Tensor, bits: int, scaling: float, tau1: float,
    tau2: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``mmqc::kv_attention`` on CUDA."""
    attention_op.check(q, k_words, v_words, k_text, v_text, bits)
    fits = attention.supports(q, k_words, v_words, v_scale, k_text, v_text, bits) is None
    run = attention.kv_attention if fits else attention_op.reference
    return run(q, k_words, v_words, k_scale, k_offset, v_scale, v_offset, visual_count, k_text, v_text, text_count, bits,
               scaling, tau1, tau2)  # fmt: skip


for name, kernel in (("mmqc::kv_pack", kv_pack), ("mmqc::kv_attention", kv_attention)):
    torch.library.impl(name, "CUDA", kernel)
