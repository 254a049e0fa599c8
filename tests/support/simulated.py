"""An oracle: the quantized linears of ops/ computed in floating point alone, with the numbers of the integer path.

    y[m, n] = (sum_j (sum over k of group j of x_q[m, k] w_q[n, k]) s[n, j]) s_x(m) s_w[n] + b[n]

Shapes:  those of ops/scaled_matmul.py, mixed_matmul.py, grouped_matmul.py and weight_only_matmul.py
Exact:   sums of products of codes are integers below 2^53, which float64 holds: the sum of a group, and with integer scales that
         of all groups, is the number that int32 holds.  What follows is the op's own float32 arithmetic in the op's order,
         so the result equals that of the op to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import Mock, patch

import torch
from torch import Tensor

from mmqc.ops import grouped_matmul as grouped
from mmqc.ops import mixed_matmul as mixed
from mmqc.ops.pack import unpack
from mmqc.ops.quantize import row_scale as scale_of_rows
from mmqc.ops.scaled_matmul import check
from mmqc.ops.weight_only_matmul import reference as weight_only_matmul


@contextmanager
def simulated_products() -> Iterator[dict[str, Mock]]:
    """These functions in place of the ops of their names; yields them, to ask which were called."""
    products = {
        "grouped_matmul": grouped_matmul,
        "mixed_matmul": mixed_matmul,
        "scaled_matmul": scaled_matmul,
        "weight_only_matmul": weight_only_matmul,
    }
    called = {name: Mock(wraps=product) for name, product in products.items()}
    with patch.multiple(torch.ops.mmqc, **called):
        yield called


def scaled_matmul(
    x_q: Tensor,
    w_q: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    visual: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    group_scale: Tensor | None = None,
    group_size: int = 0,
) -> Tensor:
    """``mmqc::scaled_matmul``, every product in float64."""
    check(x_q, w_q, x_scale, w_scale, visual, weight_bits, group_scale, group_size)
    rows = scale_of_rows(x_scale, visual)
    return _multiply(x_q, w_q, rows, w_scale, bias, weight_bits, out_dtype, group_scale, group_size)


def _multiply(
    x_q: Tensor,
    w_q: Tensor,
    rows: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    weight_bits: int,
    out_dtype: torch.dtype,
    group_scale: Tensor | None,
    group_size: int,
) -> Tensor:
    """With the scale of every row, [1] or [..., 1]."""
    width = x_q.shape[-1]
    wide = torch.promote_types(out_dtype, torch.float32)
    x, w = x_q.double(), unpack(w_q, width, weight_bits).double()
    if group_scale is not None:
        w = w * group_scale.double().repeat_interleave(group_size, 1)[:, :width]
    if group_size and group_scale is None:
        y = x.new_zeros((*x.shape[:-1], len(w)), dtype=wide)
        for j, (x_j, w_j) in enumerate(zip(x.split(group_size, -1), w.split(group_size, -1), strict=True)):
            y += (x_j @ w_j.T).to(wide) * w_scale[:, j].to(wide)
    else:
        y = (x @ w.T).to(wide)
    y = y * rows.to(wide)
    if w_scale.dim() == 1:
        y = y * w_scale.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(out_dtype)


def mixed_matmul(
    x_q: Tensor,
    x_scale: Tensor,
    x_offset: Tensor,
    w_q: Sequence[Tensor],
    w_scale: Tensor,
    w_sum: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    weight_bits: Sequence[int],
    out_dtype: torch.dtype,
) -> Tensor:
    """``mmqc::mixed_matmul``, every product in float64."""
    mixed.check(x_q, x_scale, x_offset, w_q, w_scale, w_sum, widths, weight_bits)
    wide = torch.promote_types(out_dtype, torch.float32)
    s_x, o_x, s_w, c = (t.to(wide) for t in (x_scale, x_offset, w_scale, w_sum))
    y = torch.zeros((), dtype=wide, device=x_q.device)
    for p, (x, w) in enumerate(zip(x_q.double().split(list(widths), -1), w_q, strict=True)):
        acc = (x @ unpack(w, widths[p], weight_bits[p]).double().T).to(wide)
        y = y + (acc * s_x[..., p, None] * s_w[:, p] + o_x[..., p, None] * (s_w[:, p] * c[:, p]))
    return (y if bias is None else y + bias.to(wide)).to(out_dtype)


def grouped_matmul(
    x: Tensor,
    w_q: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    weight_bits: int,
    group_size: int,
    out_dtype: torch.dtype,
    w_zero: Tensor | None = None,
) -> Tensor:
    """``mmqc::grouped_matmul``: of floating-point rows the reference, of integer rows every product in float64."""
    if row_scale is None:
        args = (x, w_q, w_scale, offsets, bias, row_scale, weight_bits, group_size, out_dtype, w_zero)
        return grouped.reference(*args)
    grouped.check(x, w_q, w_scale, offsets, bias, row_scale, weight_bits, group_size, w_zero)
    y = x.new_zeros((x.shape[0], w_q.shape[1]), dtype=out_dtype)
    for e, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        b, rows = None if bias is None else bias[e], row_scale[start:end, None]
        y[start:end] = _multiply(x[start:end], w_q[e], rows, w_scale[e], b, weight_bits, out_dtype, None, group_size)
    return y
