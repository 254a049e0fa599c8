"""Per-token quantization and what stands in front of it on CUDA, as launches in the generated code.

Shapes:  those of ops/norm_quantize_per_token.py, hadamard_quantize_per_token.py and basis_quantize_per_token.py
Each returns None where no kernel takes the operands: then the op is lowered as on any device, and ``why_not`` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmqc.kernels.hadamard import basis_quantize_per_token as in_basis
from mmqc.kernels.hadamard import hadamard_quantize_per_token as transformed
from mmqc.kernels.hadamard.hadamard_plan import best_tiling
from mmqc.kernels.hadamard.hadamard_slices import few
from mmqc.kernels.rows import norm_quantize_per_token as normed
from mmqc.kernels.shared.row_scale import Rows
from mmqc.lowering import on_cuda
from mmqc.lowering.inductor import TensorBox, lowerings, size_hint
from mmqc.lowering.launch import MANY, Operand, emit
from mmqc.lowering.mixed_on_cuda import quantize

aten = torch.ops.aten
Boxes = tuple[TensorBox, TensorBox, TensorBox]


def why_not(x: Any, widths: Sequence[int], vectors: Sequence[Any], round_first: bool) -> str | None:
    """None, or why norm_quantize_per_token's kernel cannot take rows like x, gains and biases like ``vectors``."""
    dtype, width = _dtype(x), sum(widths)
    wrong = [_dtype(v) for v in vectors if _dtype(v) not in (normed.DTYPES if not round_first else (dtype,))]
    if dtype not in normed.DTYPES:
        return f"{dtype} rows are normalised in float64"
    if width > normed.MAX_WIDTH or len(widths) > 3:
        return f"{width} channels in {len(widths)} parts: the kernel takes {normed.MAX_WIDTH} in three"
    return f"a gain or bias is {wrong[0]} beside rows of {dtype}" if wrong else None


def why_not_basis(x: Any, widths: Sequence[int]) -> str | None:
    """None, or why basis_quantize_per_token's kernel cannot take rows like x."""
    if _dtype(x) not in in_basis.DTYPES:
        return f"{_dtype(x)} rows are turned in float64"
    if sum(widths) > in_basis.MAX_WIDTH or len(widths) > 2:
        return f"heads of {sum(widths)} channels in {len(widths)} parts: the kernel takes {in_basis.MAX_WIDTH} in two"
    return None


def _dtype(x: Any) -> torch.dtype:
    return x.dtype if isinstance(x, Tensor) else x.get_dtype()


def norm(
    x: TensorBox,
    residual: TensorBox | None,
    gain: TensorBox | None,
    bias: TensorBox | None,
    eps: float,
    round_first: bool,
    order: TensorBox | None,
    widths: Sequence[int],
    bits: Sequence[int],
) -> tuple[Boxes, TensorBox | None] | None:
    """``norm_quantize_per_token``: q, s and o, and x + r where there is a residual."""
    if why_not(x, widths, [v for v in (gain, bias) if v is not None], round_first) is not None:
        return None
    size, matrix = list(x.get_size()), Operand.matrix(x)
    m, planned, out = _rows(matrix, len(widths))
    g, b, o = (None if v is None else Operand(v) for v in (gain, bias, order))
    r = None if residual is None else Operand.matrix(residual)
    total = None if r is None else Operand.new(matrix.shape, matrix.dtype, matrix.device)
    given: Any = normed.Norm(eps, g, b, r, round_first)  # type: ignore[arg-type]
    emit(normed.launch(matrix.of(planned), given, out, total, widths, bits, o), m, planned)  # type: ignore[arg-type]
    return _shaped(out, size), None if total is None else lowerings[aten.view.default](total.box, size)


def hadamard(x: TensorBox, up: TensorBox | None, bits: int) -> Boxes | None:
    """``hadamard_quantize_per_token``; few wide rows are transformed in slices, and then quantized."""
    size, matrix = list(x.get_size()), Operand.matrix(x)
    tiling: Any = best_tiling(matrix.shape[1])
    if isinstance(matrix.shape[0], int) and few(matrix, tiling):  # type: ignore[arg-type]
        return quantize(on_cuda.hadamard(x, up), [matrix.shape[1]], [bits])
    gate = None if up is None else Operand.matrix(up)
    m, _, out = _rows(matrix, 1)
    planned = m if isinstance(m, int) else 1 << 20  # a persistent grid: programs without rows end at once
    plan = on_cuda.plan_constants(matrix.shape[1], matrix)
    emit(transformed.launch(matrix.of(planned), gate, out, plan, bits), m, planned)  # type: ignore[arg-type]
    return _shaped(out, size)


def basis(x: TensorBox, u: TensorBox, widths: Sequence[int], bits: Sequence[int]) -> Boxes | None:
    """``basis_quantize_per_token``."""
    if why_not_basis(x, widths) is not None:
        return None
    size, matrix = list(x.get_size()), Operand.matrix(x)
    m, planned, out = _rows(matrix, len(widths))
    emit(in_basis.launch(matrix.of(planned), Operand(u), out, widths, bits), m, planned)  # type: ignore[arg-type]
    return _shaped(out, size)


def _rows(x: Operand, parts: int) -> tuple[Any, int, Any]:
    """Rows of x, how many to choose a tile for, and memory for their codes, scales and offsets."""
    m, width = x.shape
    s, o = (Operand.new((m, parts), torch.float32, x.device) for _ in "so")
    return m, m if isinstance(m, int) else size_hint(m, MANY), Rows(Operand.new((m, width), torch.int8, x.device), s, o)  # type: ignore[arg-type]


def _shaped(rows: Any, size: Sequence[Any]) -> Boxes:
    q, s, o = (lowerings[aten.view.default](t.box, [*size[:-1], t.shape[1]]) for t in rows)
    return q, s, o
