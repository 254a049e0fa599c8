"""scaled_matmul: on CUDA the Triton kernel; elsewhere ``_int_mm`` and a pointwise epilogue.

    y = (x_q w_qᵀ) s_x(m) s_w[n] + b[n]        or with group scales, ops/scaled_matmul.py

Without the kernel the epilogue is Inductor IR, so the residual add, the activation and the next quantize fuse into it.
What the kernel or ``_int_mm`` cannot take is padded or multiplied in another way, and ``why_not`` says so for the record.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mmqc import kernels
from mmqc.lowering.inductor import (
    Pointwise,
    TensorBox,
    at_least,
    at_most,
    call_kernel,
    convert,
    current_node,
    has_kernel,
    lowerings,
    ops,
    register_lowering,
    row_major,
    static_int,
)
from mmqc.lowering.pack import unpack
from mmqc.lowering.quantize import row_scale_loader
from mmqc.ops.integer_matmul import CUDA_MIN_ROWS, cuda_padding, why_not_int_mm
from mmqc.ops.pack import FLOAT8

aten = torch.ops.aten


NO_CUDA = "not on CUDA"


def why_no_kernel(node: fx.Node) -> str | None:
    """None, or why the CUDA kernel cannot take this node of an ATen graph; ``NO_CUDA`` where there is none."""
    values = traced_operands(node)
    if values[0].device.type != "cuda" or not kernels.install():
        return NO_CUDA
    from mmqc.kernels import on_cuda

    ops = torch.ops.mmqc
    if node.target in (ops.weight_only_matmul.default, ops.weight_only_matmuls.default):
        x, w_q, w_scale, bias, *rest = values
        return _first(on_cuda.why_not_weight_only(x, w, s, b, *rest) for w, s, b in _each(w_q, w_scale, bias))
    x_q, w_q, _, w_scale, bias, _, bits, out_dtype, *groups = values
    integer, group_size = groups if len(groups) == 2 else (None, 0)
    if isinstance(w_q, Sequence) and integer is None:
        integer = [None] * len(w_q)
    return _first(
        on_cuda.why_not_scaled(x_q, w, s, b, bits, out_dtype, t, group_size) for w, s, b, t in _each(w_q, w_scale, bias, integer)
    )


def traced_operands(node: fx.Node) -> list[Any]:
    """The operands as they were traced."""
    traced: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
    return list(traced)


def _each(*operands: Any) -> list[tuple[Any, ...]]:
    """The operands of every linear: one, or the lists of a fused op."""
    return list(zip(*operands, strict=True)) if isinstance(operands[0], Sequence) else [operands]


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason), None)


def why_not(node: fx.Node) -> str | None:
    """None, or why the kernel (on CUDA), or the plain ``_int_mm``, cannot take this node of an ATen graph as it is."""
    if (reason := why_no_kernel(node)) is not NO_CUDA:
        return reason
    x_q, w_q = traced_operands(node)[:2]
    if x_q.dtype == FLOAT8:
        return f"float8 on {x_q.device.type}: float64 matmul instead"
    if len(node.args) > 9 and node.args[9]:
        return f"group scales on {x_q.device.type}: float64 matmul instead"
    rows = math.prod(x_q.shape[:-1])
    large, one = statically_known_true(rows >= CUDA_MIN_ROWS), statically_known_true(rows == 1)
    weights = w_q if isinstance(w_q, Sequence) else [w_q]
    return _first(why_not_int_mm(x_q.device.type, large, w.shape[0], x_q.shape[-1], one) for w in weights)


def takes_kernel(x: TensorBox) -> bool:
    """Whether the op being lowered goes to the CUDA kernels."""
    return has_kernel(x) and why_no_kernel(current_node()) is None


def on_cuda() -> Any:
    """The launches, which need Triton."""
    return importlib.import_module("mmqc.lowering.on_cuda")


def _int_mm(x: TensorBox, w: TensorBox) -> TensorBox:
    # aten's CPU kernel takes the stride of a single row for the width of the matrix.
    return lowerings[aten._int_mm.default](row_major(x), lowerings[aten.permute.default](row_major(w), [1, 0]))


def _padded_int_mm(x: TensorBox, w: TensorBox, n: int, k: int, rows_known_large: bool) -> TensorBox:
    m = x.get_size()[0]
    dm, dn, dk = cuda_padding(CUDA_MIN_ROWS if rows_known_large else 1, n, k)
    pad, cut = lowerings[aten.constant_pad_nd.default], lowerings[aten.slice.Tensor]
    acc = _int_mm(pad(x, [0, dk, 0, dm], 0), pad(w, [0, dk, 0, dn], 0))
    return cut(cut(acc, 0, 0, m), 1, 0, n)


def int_matmul(x: TensorBox, w: TensorBox, n: int, k: int) -> TensorBox:
    """X wᵀ in int32 (exact in float64 where no integer product is to be had, and of float8 codes)."""
    device = x.get_device_or_error().type
    rows, floats = x.get_size()[0], x.get_dtype() == FLOAT8
    large = at_least(rows, CUDA_MIN_ROWS)
    if not floats and why_not_int_mm(device, large, n, k, at_most(rows, 1)) is None:
        return _int_mm(x, w)
    if not floats and device == "cuda":
        return _padded_int_mm(x, w, n, k, large)
    w = lowerings[aten.permute.default](convert(w, torch.float64), [1, 0])
    return lowerings[aten.mm.default](convert(x, torch.float64), w)


def _group_matmul(x: TensorBox, codes: TensorBox, scale: TensorBox, group_size: int) -> TensorBox:
    """sum_j C_j s_j as one product in float64: exact for integer scales, beyond float32 for float ones."""
    (n, k), groups = (static_int(size) for size in codes.get_size()), static_int(scale.get_size()[1])
    w = convert(codes, torch.float64)
    if groups * group_size > k:
        w = lowerings[aten.constant_pad_nd.default](w, [0, groups * group_size - k], 0)
    w = lowerings[aten.view.default](w, [n, groups, group_size])
    w = lowerings[aten.mul.Tensor](w, convert(lowerings[aten.unsqueeze.default](scale, 2), torch.float64))
    w.realize()  # with its groups as an axis: a loop over k // g is wrong where g does not divide K (torch 2.13)
    w = lowerings[aten.slice.Tensor](lowerings[aten.view.default](w, [n, groups * group_size]), 1, 0, k)
    return lowerings[aten.mm.default](convert(x, torch.float64), lowerings[aten.permute.default](w, [1, 0]))


@register_lowering(torch.ops.mmqc.scaled_matmul.default, type_promotion_kind=None)
def lower_scaled_matmul(
    x_q: TensorBox,
    w_q: TensorBox,
    x_scale: TensorBox,
    w_scale: TensorBox,
    bias: TensorBox | None,
    visual: TensorBox | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    group_scale: TensorBox | None = None,
    group_size: int = 0,
) -> TensorBox:
    """Integer product, then pointwise IR in the order of the formula."""
    if takes_kernel(x_q):
        groups = None if group_scale is None else [group_scale], group_size
        if not on_cuda().scaled_is_called(x_q, [w_q], [w_scale], [bias], out_dtype, *groups):
            return on_cuda().scaled(x_q, [w_q], x_scale, [w_scale], [bias], visual, out_dtype, *groups)[0]
        op = torch.ops.mmqc.scaled_matmul.default
        return call_kernel(op, x_q, w_q, x_scale, w_scale, bias, visual, weight_bits, out_dtype, group_scale, group_size)
    rows = list(x_q.get_size()[:-1])
    n, k = static_int(w_q.get_size()[0]), static_int(x_q.get_size()[-1])
    size = [*rows, n]
    flat = lowerings[aten.view.default](x_q, [math.prod(rows), k])
    codes = unpack(w_q, k, weight_bits)
    if group_size:
        flat_acc = _group_matmul(flat, codes, w_scale if group_scale is None else group_scale, group_size)
    else:
        flat_acc = int_matmul(flat, codes, n, k)
    acc = lowerings[aten.view.default](flat_acc, size)
    dtype = torch.promote_types(out_dtype, torch.float32)
    load, load_x = acc.make_loader(), row_scale_loader(x_scale, visual, rows, dtype)
    load_w = w_scale.make_loader() if len(w_scale.get_size()) == 1 else None
    load_bias = None if bias is None else bias.make_loader()

    def inner(index: Sequence[Any]) -> Any:
        value = ops.mul(ops.to_dtype(load(index), dtype), load_x(index[:-1]))
        if load_w is not None:
            value = ops.mul(value, ops.to_dtype(load_w(index[-1:]), dtype))
        if load_bias is not None:
            value = ops.add(value, ops.to_dtype(load_bias(index[-1:]), dtype))
        return ops.to_dtype(value, out_dtype)

    return Pointwise.create(device=x_q.get_device_or_error(), dtype=out_dtype, inner_fn=inner, ranges=size)
