"""Per-token quantization together with what stands in front of it, on CUDA: importing this file registers the kernels.

    mmqc::norm_quantize_per_token, hadamard_quantize_per_token, basis_quantize_per_token   on CUDA   ->  the Triton kernels

What a kernel cannot take goes to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.kernels.hadamard import basis_quantize_per_token as in_basis
from mmqc.kernels.hadamard import hadamard_quantize_per_token as transformed
from mmqc.kernels.on_cuda import why_not_hadamard
from mmqc.kernels.rows import norm_quantize_per_token as normed
from mmqc.kernels.shared.row_scale import Rows
from mmqc.ops import basis_quantize_per_token as basis_op
from mmqc.ops import hadamard as hadamard_op
from mmqc.ops import hadamard_quantize_per_token as hadamard_quantize_op
from mmqc.ops import norm_quantize_per_token as norm_op


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _shaped(rows: Rows, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = (*like.shape[:-1], rows.scale.shape[1])
    return rows.q.view(like.shape), rows.scale.view(size), rows.offset.view(size)


def norm_quantize_per_token(
    x: Tensor, residual: Tensor | None, gain: Tensor | None, bias: Tensor | None, eps: float, round_first: bool,
    order: Tensor | None, widths: Sequence[int], bits: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``mmqc::norm_quantize_per_token`` on CUDA."""
    norm_op.check(x, residual, gain, bias)
    norm = normed.Norm(eps, gain, bias, None if residual is None else _rows(residual), round_first)
    if normed.supports(_rows(x), norm, order, widths, bits) is not None:
        return norm_op.reference(x, residual, gain, bias, eps, round_first, order, widths, bits)
    rows, total = normed.norm_quantize_per_token(_rows(x), norm, widths, bits, order=order)
    return *_shaped(rows, x), x.new_empty(0) if total is None else total.view(x.shape)


def hadamard_quantize_per_token(
    x: Tensor, up: Tensor | None, factors: list[Tensor], bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmqc::hadamard_quantize_per_token`` on CUDA."""
    hadamard_op.check(x, factors)
    gate = None if up is None else _rows(up)
    if why_not_hadamard(_rows(x), factors) is not None or transformed.supports(_rows(x), gate, bits) is not None:
        return hadamard_quantize_op.reference(x, up, factors, bits)
    return _shaped(transformed.hadamard_quantize_per_token(_rows(x), bits, up=gate), x)


def basis_quantize_per_token(
    x: Tensor, basis: Tensor, widths: Sequence[int], bits: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmqc::basis_quantize_per_token`` on CUDA."""
    basis_op.check(x, basis)
    if in_basis.supports(_rows(x), basis, widths, bits) is not None:
        return basis_op.reference(x, basis, widths, bits)
    return _shaped(in_basis.basis_quantize_per_token(_rows(x), basis, widths, bits), x)


for implementation in (norm_quantize_per_token, hadamard_quantize_per_token, basis_quantize_per_token):
    torch.library.impl(f"mmqc::{implementation.__name__}", "CUDA", implementation)
