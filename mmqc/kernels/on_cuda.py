"""The ops' implementation on CUDA: importing this file registers it; what a kernel cannot take goes to the reference.

    mmqc::scaled_matmul(s), scaled_matmul_epilogue, token_matmul, weight_only_matmul(s), float4_matmul, grouped_matmul,
    gptq_block, learned_round, learned_round_gradients
                                                       on CUDA   ->  the Triton kernels, rows flattened

``why_not_scaled`` and its like say what a kernel cannot take; a compiled graph's record repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.kernels.matmul import float4_matmul as float4_kernel
from mmqc.kernels.matmul import group_scaled_matmul as group_scaled_kernel
from mmqc.kernels.matmul import grouped_matmul as grouped_kernel
from mmqc.kernels.matmul import scaled_matmul as scaled_kernel
from mmqc.kernels.matmul import scaled_matmul_epilogue as epilogue_kernel
from mmqc.kernels.matmul import weight_only_matmul as weight_only_kernel
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.rows import quantize_by_token as by_token_kernel
from mmqc.kernels.shared.plan import Refusal
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.kernels.solvers import gptq_block as gptq_kernel
from mmqc.kernels.solvers import learned_rounding as rounding_kernel
from mmqc.ops import float4_matmul as float4_op
from mmqc.ops import gptq_block as gptq_op
from mmqc.ops import grouped_matmul as grouped_op
from mmqc.ops import learned_round as round_op
from mmqc.ops import learned_round_gradients as round_gradients_op
from mmqc.ops import scaled_matmul as scaled_op
from mmqc.ops import scaled_matmul_epilogue as epilogue_op
from mmqc.ops import token_matmul as token_op
from mmqc.ops import weight_only_matmul as weight_only_op
from mmqc.ops.define import in_plain_torch, use_on_cuda
from mmqc.ops.quantize import check_scale

PLAIN_ROWS = 2048


def _matrix(x: Tensor) -> Tensor:
    """[..., K] as rows; a copy only if its rows are not contiguous."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _results(x: Tensor, w_q: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Every linear's y, as the op returns it and as rows."""
    ys = [x.new_empty((*x.shape[:-1], w.shape[0]), dtype=dtype) for w in w_q]
    return ys, [y if y.dim() == 2 else y.view(-1, y.shape[-1]) for y in ys]


def why_not_scaled(
    x_q: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, out_dtype: torch.dtype,
    group_scale: Tensor | None = None, group_size: int = 0,
) -> str | None:
    """None, or why the kernel cannot take these operands."""
    if (weight_bits == 4) != (w_q.dtype == torch.uint8):
        return f"{weight_bits} bits are stored as {w_q.dtype}"
    if group_size:
        return group_scaled_kernel.supports(_matrix(x_q), w_q, w_scale, bias, out_dtype, group_scale, group_size)
    return scaled_kernel.supports(_matrix(x_q), w_q, w_scale, bias, out_dtype)


def scaled_matmul(
    x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, visual: Tensor | None,
    weight_bits: int, out_dtype: torch.dtype, group_scale: Tensor | None = None, group_size: int = 0,
) -> Tensor:
    """``mmqc::scaled_matmul`` on CUDA."""
    if in_plain_torch():
        more = w_q, x_scale, w_scale, bias, visual, weight_bits, out_dtype, group_scale, group_size
        parts = [x_q] if visual is not None else _matrix(x_q).split(PLAIN_ROWS)  # sums in 32 bits, some parts at a time
        return torch.cat([scaled_op.reference(x, *more) for x in parts]).view(*x_q.shape[:-1], w_q.shape[0])
    integer = None if group_scale is None else [group_scale]
    return scaled_matmuls(x_q, [w_q], x_scale, [w_scale], [bias], visual, weight_bits, out_dtype, integer, group_size)[0]


def scaled_matmuls(
    x_q: Tensor, w_q: list[Tensor], x_scale: Tensor, w_scale: list[Tensor], bias: list[Tensor | None],
    visual: Tensor | None, weight_bits: int, out_dtype: torch.dtype, group_scale: list[Tensor] | None = None,
    group_size: int = 0,
) -> list[Tensor]:
    """``mmqc::scaled_matmuls`` on CUDA."""
    x_rows = _matrix(x_q)
    operands = list(zip(w_q, w_scale, bias, group_scale or [None] * len(w_q), strict=True))
    for w, s, b, t in operands:
        scaled_op.check(x_q, w, x_scale, s, visual, weight_bits, t, group_size)
        if why_not_scaled(x_rows, w, s, b, weight_bits, out_dtype, t, group_size) is not None:
            one = scaled_op.reference if len(w_q) == 1 else scaled_matmul
            return [
                one(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype, t, group_size) for w, s, b, t in operands
            ]
    ys, flat = _results(x_q, w_q, out_dtype)
    rows = row_scale(x_scale.float(), flat[0].shape[0], _mask(visual, x_q))
    linears = [Linear(w, s, b, y, t) for (w, s, b, t), y in zip(operands, flat, strict=True)]
    group_scaled_kernel.multiply(x_rows, linears, rows, group_size)
    return ys


def why_not_token(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int,
    code: torch.dtype | None = None,
) -> str | None:
    """None, or why the kernels cannot take these operands."""
    rows, dtype = _matrix(x), code or torch.int8
    codes = torch.empty_strided(rows.shape, (rows.shape[1], 1), dtype=dtype, device=x.device)
    return by_token_kernel.why_not(rows, dtype) or why_not_scaled(
        codes, w_q, w_scale, bias, weight_bits, x.dtype, None, group_size
    )


def token_matmul(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int,
    code: torch.dtype | None = None,
) -> Tensor:
    """``mmqc::token_matmul`` on CUDA: a pass over the rows, and the product that static scales have."""
    dtype = token_op.check(x, w_q, w_scale, weight_bits, group_size, code)
    plan = by_token_kernel.plan(_matrix(x), dtype)
    if isinstance(plan, Refusal):
        return token_op.reference(x, w_q, w_scale, bias, weight_bits, group_size, code)
    x_q, scale = plan.run()
    if why_not_scaled(x_q, w_q, w_scale, bias, weight_bits, x.dtype, None, group_size) is not None:
        return token_op.reference(x, w_q, w_scale, bias, weight_bits, group_size, code)
    (y,), (flat,) = _results(x, [w_q], x.dtype)
    linears, rows = [Linear(w_q, w_scale, bias, flat, None)], row_scale(scale.view(-1), len(flat))
    if group_size:
        group_scaled_kernel.multiply(x_q, linears, rows, group_size)
    else:
        scaled_kernel.multiply(x_q, linears, rows)
    return y


def _mask(visual: Tensor | None, x: Tensor) -> Tensor | None:
    """The mask of every row."""
    return None if visual is None else visual.expand(x.shape[:-1]).reshape(-1)


def why_not_epilogue(
    x_q: Tensor, w_q: list[Tensor], w_scale: list[Tensor], bias: list[Tensor | None], weight_bits: int,
    out_dtype: torch.dtype,
) -> str | None:
    """None, or why the kernel cannot take these operands."""
    parts = zip(w_q, w_scale, bias, strict=True)
    reason = next((why for p in parts if (why := why_not_scaled(x_q, *p, weight_bits, out_dtype))), None)
    if reason is None and len({b is None for b in bias}) > 1:
        reason = "one of gate and up has a bias, the other has none"
    if reason is None and w_q[0].stride(0) != w_q[-1].stride(0):
        reason = "rows of gate and up are not equally far apart"
    return reason


def scaled_matmul_epilogue(
    x_q: Tensor, w_q: list[Tensor], x_scale: Tensor, w_scale: list[Tensor], bias: list[Tensor | None],
    visual: Tensor | None, weight_bits: int, out_dtype: torch.dtype, activation: str, next_scale: Tensor | None = None,
    next_visual: Tensor | None = None, next_bits: int = 8, low_x: Tensor | None = None, low_w: Tensor | None = None,
) -> Tensor:
    """``mmqc::scaled_matmul_epilogue`` on CUDA."""
    epilogue_op.check(w_q, activation, low_x, low_w)
    x_rows = _matrix(x_q)
    if why_not_epilogue(x_rows, w_q, w_scale, bias, weight_bits, out_dtype) is not None:
        z = [scaled_matmul(x_q, w, x_scale, s, b, visual, weight_bits, out_dtype)
             for w, s, b in zip(w_q, w_scale, bias, strict=True)]
        return epilogue_op.after(z, activation, next_scale, next_visual, next_bits, low_x, low_w)
    for w, s in zip(w_q, w_scale, strict=True):
        scaled_op.check(x_q, w, x_scale, s, visual, weight_bits)
    (y,), flat = _results(x_q, w_q[:1], out_dtype if next_scale is None else torch.int8)
    m, codes = flat[0].shape[0], None
    if next_scale is not None:
        check_scale(next_scale, next_visual)
        codes = row_scale(next_scale.float(), m, _mask(next_visual, x_q))
    linears = [Linear(*parts, flat[0]) for parts in zip(w_q, w_scale, bias, strict=True)]
    rows = row_scale(x_scale.float(), m, _mask(visual, x_q))
    low = None if low_x is None or low_w is None else (_matrix(low_x).contiguous(), low_w.contiguous())
    epilogue_kernel.scaled_matmul_epilogue(x_rows, linears, rows, Epilogue(activation, out_dtype, codes, next_bits, low))
    return y


def why_not_weight_only(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int,
    w_zero: Tensor | None = None,
) -> str | None:
    """None, or why the kernel cannot take these operands."""
    if x.dtype == torch.float32:
        return "float32 activations are multiplied in float32"
    return weight_only_kernel.supports(_matrix(x), w_q, w_scale, bias, group_size, w_zero, weight_bits)


def weight_only_matmul(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int,
    w_zero: Tensor | None = None,
) -> Tensor:
    """``mmqc::weight_only_matmul`` on CUDA."""
    if w_zero is None:
        return weight_only_matmuls(x, [w_q], [w_scale], [bias], weight_bits, group_size)[0]
    weight_only_op.check(x, w_q, w_scale, weight_bits, group_size, w_zero)
    rows = _matrix(x)
    if why_not_weight_only(rows, w_q, w_scale, bias, weight_bits, group_size, w_zero) is not None:
        return weight_only_op.reference(x, w_q, w_scale, bias, weight_bits, group_size, w_zero)
    (y,), flat = _results(x, [w_q], x.dtype)
    weight_only_kernel.multiply(rows, [Linear(w_q, w_scale, bias, flat[0])], group_size, weight_bits, w_zero)
    return y


def weight_only_matmuls(
    x: Tensor, w_q: list[Tensor], w_scale: list[Tensor], bias: list[Tensor | None], weight_bits: int, group_size: int
) -> list[Tensor]:
    """``mmqc::weight_only_matmuls`` on CUDA."""
    x_rows = _matrix(x)
    for w, s, b in zip(w_q, w_scale, bias, strict=True):
        weight_only_op.check(x, w, s, weight_bits, group_size)
        if why_not_weight_only(x_rows, w, s, b, weight_bits, group_size) is not None:
            if len(w_q) == 1:
                return [weight_only_op.reference(x, w, s, b, weight_bits, group_size)]
            operands = zip(w_q, w_scale, bias, strict=True)
            return [weight_only_matmul(x, w, s, b, weight_bits, group_size) for w, s, b in operands]
    ys, flat = _results(x, w_q, x.dtype)
    linears = [Linear(*parts) for parts in zip(w_q, w_scale, bias, flat, strict=True)]
    weight_only_kernel.multiply(x_rows, linears, group_size, weight_bits)
    return ys


def why_not_float4(
    x: Tensor, w_q: Tensor, w_scale: Tensor, divisor: Tensor | None, bias: Tensor | None, form: str
) -> str | None:
    """None, or why the kernel cannot take these operands."""
    if x.dtype == torch.float32:
        return "float32 activations are multiplied in float32"
    return float4_kernel.supports(_matrix(x), w_q, w_scale, divisor, bias, form)


def float4_matmul(
    x: Tensor, w_q: Tensor, w_scale: Tensor, divisor: Tensor | None, bias: Tensor | None, form: str
) -> Tensor:
    """``mmqc::float4_matmul`` on CUDA."""
    float4_op.check(x, w_q, w_scale, divisor, form)
    if why_not_float4(x, w_q, w_scale, divisor, bias, form) is not None:
        return float4_op.reference(x, w_q, w_scale, divisor, bias, form)
    (y,), flat = _results(x, [w_q], x.dtype)
    float4_kernel.float4_matmul(_matrix(x), w_q, w_scale, divisor, bias, form=form, out=flat[0])
    return y


def why_not_grouped(
    x: Tensor, w_q: Tensor, w_scale: Tensor, offsets: Tensor, bias: Tensor | None, row_scale: Tensor | None,
    weight_bits: int, group_size: int, out_dtype: torch.dtype, w_zero: Tensor | None = None,
) -> str | None:
    """None, or why the kernel cannot take these operands."""
    return grouped_kernel.supports(x, w_q, w_scale, offsets, bias, row_scale, weight_bits, group_size, out_dtype, w_zero)


def grouped_matmul(
    x: Tensor, w_q: Tensor, w_scale: Tensor, offsets: Tensor, bias: Tensor | None, row_scale: Tensor | None,
    weight_bits: int, group_size: int, out_dtype: torch.dtype, w_zero: Tensor | None = None,
) -> Tensor:
    """``mmqc::grouped_matmul`` on CUDA."""
    grouped_op.check(x, w_q, w_scale, offsets, bias, row_scale, weight_bits, group_size, w_zero)
    args = (x, w_q, w_scale, offsets, bias, row_scale, weight_bits, group_size, out_dtype, w_zero)
    if why_not_grouped(*args) is not None:
        return grouped_op.reference(*args)
    return grouped_kernel.grouped_matmul(
        x, w_q, w_scale, offsets, bias, row_scale, bits=weight_bits, group_size=group_size, out_dtype=out_dtype, zero=w_zero
    )


def gptq_block(
    w: Tensor, u: Tensor, scale: Tensor, zero: Tensor | None, bits: int, float4: bool = False
) -> tuple[Tensor, Tensor]:
    """``mmqc::gptq_block`` on CUDA."""
    gptq_op.check(w, u, scale, zero, bits, float4)
    if gptq_kernel.supports(w, u, scale, zero) is not None:
        return gptq_op.reference(w, u, scale, zero, bits, float4)
    return gptq_kernel.gptq_block(w, u, scale, zero, bits, float4=float4)


def learned_round(
    codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, bits: int, dtype: torch.dtype
) -> Tensor:
    """``mmqc::learned_round`` on CUDA."""
    round_op.check(codes, offset, step, zero, bits)
    if rounding_kernel.supports(codes, offset, step, zero) is not None:
        return round_op.reference(codes, offset, step, zero, bits, dtype)
    return rounding_kernel.learned_round(codes, offset, step, zero, bits, dtype)


def learned_round_gradients(
    codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, of_weight: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """``mmqc::learned_round_gradients`` on CUDA."""
    round_op.check(codes, offset, step, zero, bits, of_weight)
    if rounding_kernel.supports(codes, offset, step, zero, of_weight) is not None:
        return round_gradients_op.reference(codes, offset, step, zero, of_weight, bits)
    return rounding_kernel.learned_round_gradients(codes, offset, step, zero, of_weight, bits)


for implementation in (
    scaled_matmul, scaled_matmuls, scaled_matmul_epilogue, token_matmul, weight_only_matmul, weight_only_matmuls,
    float4_matmul, grouped_matmul, gptq_block, learned_round, learned_round_gradients,
):
    use_on_cuda(implementation)
