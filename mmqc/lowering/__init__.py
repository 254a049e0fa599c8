"""From mmqc ops to kernels: one file an op, composed from Inductor's own IR so that neighbours fuse with it.

``lowering.inductor`` is the only file that touches torch._inductor by name.  Importing this package imports Inductor
(seconds), so only the backend does it, and only when a graph is compiled.
"""

from __future__ import annotations

import torch
from torch import fx

from mmqc import kernels
from mmqc.lowering import (
    causal_mask,
    decode_attention,
    float4_matmul,
    fused,
    fused_per_token,
    gather_rows,
    gather_tokens,
    grouped_matmul,
    hadamard,
    materialize,
    mixed_matmul,
    modality_order,
    norm_quantize,
    quantize,
    quantize_per_token,
    rotate,
    scaled_matmul,
    scaled_matmul_epilogue,
    segment_attention,
    tag_modality,
    weight_only_matmul,
)

__all__ = [
    "causal_mask",
    "decode_attention",
    "fallbacks",
    "float4_matmul",
    "fused",
    "fused_per_token",
    "gather_rows",
    "gather_tokens",
    "grouped_matmul",
    "hadamard",
    "materialize",
    "mixed_matmul",
    "modality_order",
    "norm_quantize",
    "quantize",
    "quantize_per_token",
    "rotate",
    "scaled_matmul",
    "scaled_matmul_epilogue",
    "segment_attention",
    "tag_modality",
    "weight_only_matmul",
]

kernels.install()

WHY_NOT = {
    torch.ops.mmqc.scaled_matmul.default: scaled_matmul.why_not,
    torch.ops.mmqc.scaled_matmuls.default: scaled_matmul.why_not,
    torch.ops.mmqc.weight_only_matmul.default: weight_only_matmul.why_not,
    torch.ops.mmqc.weight_only_matmuls.default: weight_only_matmul.why_not,
    torch.ops.mmqc.float4_matmul.default: float4_matmul.why_not,
    torch.ops.mmqc.grouped_matmul.default: grouped_matmul.why_not,
    torch.ops.mmqc.mixed_matmul.default: mixed_matmul.why_not,
    torch.ops.mmqc.decode_attention.default: decode_attention.why_not,
    torch.ops.mmqc.hadamard.default: hadamard.why_not,
    torch.ops.mmqc.hadamard_quantize.default: hadamard.why_not,
    torch.ops.mmqc.hadamard_quantize_kept.default: hadamard.why_not,
    torch.ops.mmqc.hadamard_quantize_per_token.default: hadamard.why_not,
    torch.ops.mmqc.norm_quantize_per_token.default: fused_per_token.why_not_norm,
    torch.ops.mmqc.basis_quantize_per_token.default: fused_per_token.why_not_basis,
}


def fallbacks(graph: fx.GraphModule) -> list[tuple[str, str]]:
    """(op, reason) for every mmqc op of an ATen graph that its plain kernel cannot take as it is."""
    reasons = ((n, WHY_NOT[n.target](n)) for n in graph.graph.nodes if n.target in WHY_NOT)
    return [(n.name, reason) for n, reason in reasons if reason]
