"""Per-token quantization with what stands in front of it: on CUDA one kernel each; elsewhere the operations one by one.

norm_quantize_per_token         a residual's sum, an RMSNorm          in front of q, k and v, of gate and up
hadamard_quantize_per_token     a gate, a Hadamard transform          in front of down_proj
basis_quantize_per_token        a product with U_C                    keys behind RoPE
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mmqc import kernels
from mmqc.lowering.hadamard import lower_hadamard, on_cuda, takes_transform
from mmqc.lowering.inductor import TensorBox, call_kernel, convert, empty, has_kernel, lowerings, register_lowering, static_int
from mmqc.lowering.quantize_per_token import lower_quantize_per_token
from mmqc.lowering.scaled_matmul import traced_operands

aten, mmqc_ops = torch.ops.aten, torch.ops.mmqc


def why_not_norm(node: fx.Node) -> str | None:
    """None, or why the CUDA kernel cannot take this node of an ATen graph."""
    x, residual, gain, bias, _, *rest = traced_operands(node)
    if x.device.type != "cuda" or not kernels.install():
        return None
    return on_cuda().why_not_norm(x, residual, gain, bias, *rest)


def why_not_basis(node: fx.Node) -> str | None:
    """None, or why the CUDA kernel cannot take this node of an ATen graph."""
    x, basis, widths, bits = traced_operands(node)
    if x.device.type != "cuda" or not kernels.install():
        return None
    return on_cuda().why_not_basis(x, basis, widths, bits)


@register_lowering(mmqc_ops.norm_quantize_per_token.default, type_promotion_kind=None)
def lower_norm_quantize_per_token(
    x: TensorBox,
    residual: TensorBox | None,
    gain: TensorBox | None,
    bias: TensorBox | None,
    eps: float,
    round_first: bool,
    order: TensorBox | None,
    widths: Sequence[int],
    bits: Sequence[int],
) -> tuple[TensorBox, ...]:
    """The kernel, or a sum, a reduction and pointwise IR, rounded as in the op."""
    nothing = empty([0], x.get_dtype(), x.get_device_or_error())
    if has_kernel(x):
        launched = on_cuda().norm_per_token(x, residual, gain, bias, eps, round_first, order, widths, bits)
        if launched is not None:
            return *launched[0], nothing if launched[1] is None else launched[1]
    add, mul, dtype = lowerings[aten.add.Tensor], lowerings[aten.mul.Tensor], x.get_dtype()
    h = x if residual is None else add(x, residual)
    h.realize()  # read twice, by the reduction and behind it
    wide = convert(h, torch.promote_types(dtype, torch.float32))
    mean = lowerings[aten.mean.dim](mul(wide, wide), [len(x.get_size()) - 1], True)
    y = mul(wide, lowerings[aten.rsqrt.default](add(mean, eps)))
    y = convert(y, dtype) if round_first else y
    for combine, vector in ((mul, gain), (add, bias)):
        y = y if vector is None else combine(y, convert(vector, y.get_dtype()))
    q, s, o = lower_quantize_per_token(convert(y, dtype), order, widths, bits)
    return q, s, o, nothing if residual is None else h


@register_lowering(mmqc_ops.hadamard_quantize_per_token.default, type_promotion_kind=None)
def lower_hadamard_quantize_per_token(
    x: TensorBox, up: TensorBox | None, factors: list[TensorBox], bits: int
) -> tuple[TensorBox, ...]:
    """The kernel, or the gate as pointwise IR, hadamard's matmuls and the quantization's nodes."""
    if takes_transform(x, up, bits, torch.int8):
        if not on_cuda().is_called(x):
            return on_cuda().transform_per_token(x, up, bits)
        called: Any = call_kernel(mmqc_ops.hadamard_quantize_per_token.default, x, up, factors, bits)
        return tuple(called)
    if up is not None:
        wide = convert(x, torch.promote_types(x.get_dtype(), torch.float32))
        silu = lowerings[aten.mul.Tensor](wide, lowerings[aten.sigmoid.default](wide))
        x = lowerings[aten.mul.Tensor](convert(silu, x.get_dtype()), up)
    return lower_quantize_per_token(lower_hadamard(x, factors), None, [static_int(x.get_size()[-1])], [bits])


@register_lowering(mmqc_ops.basis_quantize_per_token.default, type_promotion_kind=None)
def lower_basis_quantize_per_token(
    x: TensorBox, basis: TensorBox, widths: Sequence[int], bits: Sequence[int]
) -> tuple[TensorBox, ...]:
    """The kernel, or a product and the quantization's nodes."""
    if has_kernel(x) and (launched := on_cuda().basis(x, basis, widths, bits)) is not None:
        return launched
    size = list(x.get_size())
    rows = lowerings[aten.view.default](x, [math.prod(size[:-1]), size[-1]])
    y = lowerings[aten.view.default](lowerings[aten.mm.default](rows, basis), size)
    return lower_quantize_per_token(y, None, widths, bits)
