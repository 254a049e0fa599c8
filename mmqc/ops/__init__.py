"""The dialect between passes and kernels: functional ops in the ``mmqc::`` namespace, importable with torch alone.

Importing this package defines the ops.  Each file holds one op: its formula, its plain-torch reference (which is what
runs in eager mode) and its fake kernel.  Passes name ops, lowerings and kernels implement them.
"""

from mmqc.ops import (
    basis_quantize_per_token,
    causal_mask,
    gather_rows,
    gather_tokens,
    gptq_block,
    grouped_matmul,
    hadamard,
    hadamard_quantize,
    hadamard_quantize_per_token,
    kv_attention,
    kv_pack,
    kv_round_keys,
    kv_rows_attention,
    kv_token_attention,
    materialize,
    mixed_matmul,
    modality_order,
    norm_quantize,
    norm_quantize_per_token,
    quantize,
    quantize_per_token,
    rotate,
    scaled_matmul,
    scaled_matmul_epilogue,
    scaled_matmuls,
    tag_modality,
    weight_only_matmul,
    weight_only_matmuls,
)

__all__ = [
    "basis_quantize_per_token", "causal_mask", "gather_rows", "gather_tokens", "gptq_block", "grouped_matmul",
    "hadamard", "hadamard_quantize", "hadamard_quantize_per_token", "kv_attention", "kv_pack", "kv_round_keys",
    "kv_rows_attention", "kv_token_attention", "materialize", "mixed_matmul", "modality_order", "norm_quantize",
    "norm_quantize_per_token", "quantize", "quantize_per_token", "rotate", "scaled_matmul", "scaled_matmul_epilogue",
    "scaled_matmuls", "tag_modality", "weight_only_matmul", "weight_only_matmuls",
]  # fmt: skip
