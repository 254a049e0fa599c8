"""The variable-length attention call (kernels/attention/variable_length.py) as a call of its kernels, without PyTorch's dispatcher.

    y [1, H, T, D], in memory as [1, T, H, D]          a call of our kernel's launcher on Hopper; elsewhere the op is called
                                                       in a package: a launch of the kernel that it can hold

Shapes:  those of that op
Why:     a prompt has one in every layer, and the dispatcher takes longer for each than the launch itself.
"""

from __future__ import annotations

import importlib
from typing import Any

import sympy
import torch
from torch import fx

from mmqc import kernels
from mmqc.kernels.attention import variable_length
from mmqc.kernels.shared.device_facts import has_warpgroup_products
from mmqc.lowering.inductor import (
    FixedLayout,
    FloorDiv,
    TensorBox,
    as_traced,
    call_kernel,
    current_node,
    for_package,
    lowerings,
    register_lowering,
)
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
    if for_package() and why_not_packaged(current_node()) is None:
        return _launched(q, k, v, ends_q, scale, is_causal)
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


def why_not_packaged(node: fx.Node) -> str | None:
    """None, or why a package has no launch for this node of an exported graph."""
    q, k, v, *_ = [a.meta["val"] for a in node.args[:3] if isinstance(a, fx.Node)]
    if q.device.type != "cuda" or not kernels.install():
        return "no kernels are installed for its device"
    if node.args[3] is not node.args[4]:
        return "keys in segments of their own"
    return _packed().why_not(q, k, v)


def _packed() -> Any:
    return importlib.import_module("mmqc.kernels.attention.packed_attention")


def _launched(q: TensorBox, k: TensorBox, v: TensorBox, ends: TensorBox, scale: float | None, is_causal: bool) -> TensorBox:
    """A launch, whose number of tiles follows from the rows and the number of segments."""
    launch, kernel, aten = importlib.import_module("mmqc.lowering.launch"), _packed(), torch.ops.aten
    by_token = (lowerings[aten.squeeze.dim](lowerings[aten.permute.default](x, [0, 2, 1, 3]), 0) for x in (q, k, v))
    operands = [launch.Operand.sized(x) for x in by_token]
    of_segments = launch.Operand.sized(ends)
    rows, heads, _ = operands[0].shape
    y = launch.Operand.sized(launch.empty(operands[0].shape, operands[0].dtype, operands[0].device))
    made = kernel.launch(*operands, of_segments, y, scale, causal=is_causal)
    tiles = FloorDiv(rows, made.constants["ROWS"]) + of_segments.shape[0] - 1
    launch.emit(made._replace(grid=(tiles, heads)), rows, rows)
    return lowerings[aten.permute.default](lowerings[aten.unsqueeze.default](y.box, 0), [0, 2, 1, 3])
