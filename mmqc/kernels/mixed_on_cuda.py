"""The ops of the linear in two precisions on CUDA: importing this file registers them.

    mmqc::quantize_per_token, mixed_matmul   on CUDA   ->  the Triton kernels, rows flattened, int8 codes in one matrix

What a kernel cannot take goes to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.kernels.matmul import mixed_matmul as mixed
from mmqc.kernels.matmul.unpack_weight import unpack_weight
from mmqc.kernels.rows import quantize_per_token as per_token
from mmqc.ops import mixed_matmul as mixed_op
from mmqc.ops import quantize_per_token as per_token_op


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def quantize_per_token(
    x: Tensor, order: Tensor | None, widths: Sequence[int], bits: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """``mmqc::quantize_per_token`` on CUDA."""
    per_token_op.check_parts(x.shape[-1], widths, bits)
    rows = _rows(x) if order is None else _rows(x).index_select(1, order)
    if per_token.supports(rows, widths, bits) is not None:
        return per_token_op.reference(x, order, widths, bits)
    q, scale, offset = per_token.quantize_per_token(rows, widths, bits)
    size = (*x.shape[:-1], len(widths))
    return q.view(x.shape), scale.view(size), offset.view(size)


def _weight(w_q: Sequence[Tensor], scale: Tensor, sums: Tensor, widths: Sequence[int]) -> mixed.Weight:
    """One or two parts, the second one written out."""
    low, *rest = w_q
    high = [
        unpack_weight(w, width, bits=4) if w.dtype == torch.uint8 else w
        for w, width in zip(rest, widths[1:], strict=True)
    ]
    return mixed.Weight(low, high[0] if high else None, scale, sums)


def mixed_matmul(
    x_q: Tensor, x_scale: Tensor, x_offset: Tensor, w_q: Sequence[Tensor], w_scale: Tensor, w_sum: Tensor,
    bias: Tensor | None, widths: Sequence[int], weight_bits: Sequence[int], out_dtype: torch.dtype,
) -> Tensor:
    """``mmqc::mixed_matmul`` on CUDA: packed weights are unpacked on the way, or written out and then multiplied."""
    mixed_op.check(x_q, x_scale, x_offset, w_q, w_scale, w_sum, widths, weight_bits)
    rows, s, o = _rows(x_q), *(t.reshape(-1, len(widths)).contiguous() for t in (x_scale, x_offset))
    given = per_token.Rows(rows, s, o)
    weight = _weight(w_q, w_scale, w_sum, widths) if len(widths) <= 2 else None
    y = torch.empty(len(rows), len(w_scale), dtype=out_dtype, device=rows.device)
    tile = None if weight is None else mixed.packed_tile(given, weight, y)
    if weight is not None and tile is None:
        weight = weight.written_out(widths[0])
    if weight is None or mixed.supports(given, weight, bias, out_dtype) is not None:
        return mixed_op.reference(x_q, x_scale, x_offset, w_q, w_scale, w_sum, bias, widths, weight_bits, out_dtype)
    mixed.mixed_matmul(given, weight, bias, out_dtype=out_dtype, out=y, config=tile)
    return y.view(*x_q.shape[:-1], len(w_scale))


for implementation in (quantize_per_token, mixed_matmul):
    torch.library.impl(f"mmqc::{implementation.__name__}", "CUDA", implementation)
