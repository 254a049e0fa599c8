"""The variable-length attention call (kernels/attention/variable_length.py) as a call of its kernels, without PyTorch's dispatcher.

    y [1, H, T, D], in memory as [1, T, H, D]          where our kernel is (Hopper); elsewhere the op is called

Shapes:  those of that op
Why:     a prompt has one in every layer, and the dispatcher takes longer for each than the launch itself.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from mmqc.kernels.attention import variable_length
from mmqc.kernels.shared.device_facts import has_warpgroup_products
from mmqc.lowering.inductor import FixedLayout, TensorBox, as_traced, call_kernel, current_node, register_lowering
from mmqc.lowering.python_call import has_python, result

OP = torch.ops.mmqc_front.scaled_dot_product_attention.default

as_traced(OP)


@register_lowering(OP, type_promotion_kind=None)
def lower_segment_attention(
    q: TensorBox,
    k: TensorBox,
    v: TensorBox,
    ends_q: TensorBox,
    ends_k: TensorBox,
    scale: float | None,
    is_causal: bool,
    longest: Any,
) -> TensorBox:
    """A call that makes its result."""
    device = q.get_device_or_error()
    if not has_python() or not has_warpgroup_products(device):
        return call_kernel(OP, q, k, v, ends_q, ends_k, scale, is_causal, longest)
    _, _, _, of_queries, of_keys = current_node().args[:5]
    if of_keys is of_queries:  # one buffer, by which the kernel knows it; ``as_traced`` may have made two
        ends_k = ends_q
    batch, heads, rows, _ = q.get_size()
    width = v.get_size()[3]
    size, strides = [batch, heads, rows, width], [rows * heads * width, width, heads * width, sympy.S.One]
    of_rows = FixedLayout(device, q.get_dtype(), size, strides)
    return result(variable_length.reference, (q, k, v, ends_q, ends_k), (scale, is_causal, longest), of_rows)
