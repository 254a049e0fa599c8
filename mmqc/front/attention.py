"""One variable-length attention call for a packed sequence, in place of one call per image.

    y_i = softmax(s q_i Kᵀ + m_i) V,   m_ij = 0 if segment(i) = segment(j), else −∞

Shapes:  query [1, H, T, D]   key, value [1, H_kv, T, D]   cu_seq_lens int [n + 1], from 0 to T   y [1, T, H, D]
Why:     vision towers split q, k and v by lengths that are values of a tensor, which ends a graph in every block.  For an
         attention function whose name contains "flash" they make one call with ``cu_seq_lens_q`` instead.
How:     the op of kernels/attention/variable_length.py.  With gradients a mask of T x T does it, which torch can differentiate.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.kernels.attention.variable_length import check as check
from mmqc.kernels.attention.variable_length import checked, masked

NAME = "mmqc_flash_varlen"


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention interface of transformers: [1, H, T, D] in, [1, T, H, D] out."""
    if not torch.compiler.is_dynamo_compiling() and (counted := checked()) is not None:
        counted.packed += cu_seq_lens_q is not None
        counted.other += cu_seq_lens_q is None
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    ends_q = cu_seq_lens_q
    ends_k = ends_q if cu_seq_lens_k is None else cu_seq_lens_k
    if ends_q is None or ends_k is None or dropout or (torch.is_grad_enabled() and query.requires_grad):
        y = masked(query, key, value, attention_mask, ends_q, ends_k, scaling, dropout, causal)
    else:
        longest = kwargs.get("max_length_q")  # perhaps a symbol: nothing may be decided on it
        longest = query.shape[2] if longest is None else longest
        y = torch.ops.mmqc_front.scaled_dot_product_attention(query, key, value, ends_q, ends_k, scaling, causal, longest)
    return y.transpose(1, 2).contiguous(), None


def register() -> bool:
    """Make the function known to transformers, if that is imported; a model of transformers is then possible at all."""
    if "transformers.modeling_utils" not in sys.modules:
        return False
    from transformers import AttentionInterface

    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, varlen_attention)
    return True
