"""mmqc's attention within segments (kernels/attention) as the attention of vLLM's vision towers, on Hopper.

    y_i = softmax(s q_i Kᵀ + m_i) V,   m_ij = 0 if segment(i) = segment(j), else −∞

Shapes:  q [B, S, H, D]   k, v [B, S, H_kv, D]   cu_seqlens int [n + 1], from 0 to B S, or none: B segments of S   y as q
Where:   vLLM's own choice is FlashAttention, heads have 16 to 128 channels in float16 or bfloat16, and there is one segment, or as
         many rows, with a segment as long, as in a model of ours (kernels/attention/variable_length.py: MANY, LONG).  All else
         is vLLM's own, and so is what is captured in a CUDA graph.
Why:     one launch for all images of a batch, without padding heads of 72 or 80 channels (ADR 28).

The op is opaque to torch.compile, and chooses by the rows that it is called with.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops import vit_attn_wrappers

from mmqc.kernels.attention import variable_length
from mmqc.vllm.lent import lent_here

NAME = "MMEncoderAttention"  # of vLLM's class, which a plug-in may take the place of
OP = "mmqc_vllm::encoder_attention"
# version: of vLLM's FlashAttention, which computes what our kernel does not
SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor? ends, Tensor? longest, float scale, int? version) -> Tensor"
logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own


def packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As one sequence: q, k, v [1, H, B S, D], and where its segments end."""
    batch, length = q.shape[:2]
    if ends is None:
        ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    q, k, v = (t.flatten(0, 1)[None].transpose(1, 2) for t in (q, k, v))
    return q, k, v, ends


def by_reference(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, longest: Tensor | None, scale: float, version: int | None
) -> Tensor:
    """The op by torch, segment by segment."""
    del longest, version
    q_p, k_p, v_p, ends = packed(q, k, v, ends)
    y = variable_length.reference(q_p, k_p, v_p, ends, ends, scale, False, q_p.shape[2])
    return y.transpose(1, 2).reshape(q.shape)


def on_cuda(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, longest: Tensor | None, scale: float, version: int | None
) -> Tensor:
    """The op by our kernel, or as vLLM computes it."""
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        most = q.shape[1] if longest is None or ends is None else int(longest)
        q_p, k_p, v_p, ends_p = packed(q, k, v, ends)
        y = variable_length.by_segments(q_p, k_p, v_p, ends_p, ends_p, scale, False, most)
        if y is not None:
            return y.transpose(1, 2).reshape(q.shape)
    return vit_attn_wrappers.flash_attn_maxseqlen_wrapper(q, k, v, q.shape[0], False, version, scale, ends, longest)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None, longest: Tensor | None, scale: float, version: int | None
) -> Tensor:
    del k, v, ends, longest, scale, version
    return torch.empty_like(q, memory_format=torch.contiguous_format)


torch.library.define(OP, SCHEMA, tags=torch.Tag.pt2_compliant_tag)
torch.library.impl(OP, "CPU", by_reference)
torch.library.impl(OP, "CUDA", on_cuda)
torch.library.register_fake(OP, _fake)


class SegmentEncoderAttention(MMEncoderAttention):
    """Takes the place of vLLM's class, and computes as that does where ``why_not`` names a reason."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reason = self.why_not()
        if self.reason is None:
            logger.info_once("mmqc: attention within images by mmqc's kernel, of several from %d rows on", variable_length.MANY)
        elif "attention" in lent_here():
            logger.info_once("mmqc: attention within images is vLLM's own: %s", self.reason)

    def why_not(self) -> str | None:
        """None, or why the layer is vLLM's own."""
        if "attention" not in lent_here():
            return "it was not asked for"
        if self.attn_backend != AttentionBackendEnum.FLASH_ATTN or self.fp8_enabled:
            return f"it is {self.attn_backend.name}{' in float8' if self.fp8_enabled else ''} here, not FlashAttention"
        from mmqc.kernels.attention.segment_attention import why_not_heads  # with Triton, which a GPU's vLLM has
        from mmqc.kernels.shared.device_facts import has_warpgroup_products

        if not has_warpgroup_products(torch.device("cuda")):
            return "warpgroup products are Hopper's"
        return why_not_heads(self.dtype, self.head_size)

    def forward_cuda(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: Tensor | None = None,
        sequence_lengths: Tensor | None = None,
    ) -> Tensor:
        """q, k, v [B, S, H, D] or [B, S, H D] -> as q."""
        if self.reason is not None:
            return super().forward_cuda(query, key, value, cu_seqlens, max_seqlen, sequence_lengths)
        batch, length, others = *query.shape[:2], key.shape[1]
        q, k, v = self.view_qkv_to_4d(query, key, value, batch, length, others)
        y = torch.ops.mmqc_vllm.encoder_attention(q, k, v, cu_seqlens, max_seqlen, self.scale, self._fa_version)
        return y if query.dim() == 4 else y.reshape(batch, length, -1)


def register() -> None:
    """In the place of vLLM's class, unless another plug-in is there."""
    if NAME in op_registry_oot:
        logger.warning("mmqc: attention within images is %s, of another plug-in", op_registry_oot[NAME].__name__)
        return
    MMEncoderAttention.register_oot(name=NAME)(SegmentEncoderAttention)
