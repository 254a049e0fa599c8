"""The linear with several precisions: an integer product for every part of its input channels, and one affine epilogue.

    y[m, n] = sum over parts p of  s_x[m, p] s_w[n, p] (sum over k in p of x_q[m, k] w_q[n, k])
                                   + o_x[m, p] s_w[n, p] c[n, p]           c[n, p] = sum over k in p of w_q[n, k]
              + b[n]

Shapes:  x_q int8 [..., K], s_x, o_x [..., P]: quantize_per_token.py   w_q: one int8 [N, K_p] a part, or uint8, packed (pack.py)
         s_w float32 [N, P]   c int32 [N, P]   b [N]   y [..., N] in ``out_dtype``
Exact:   the sums are int32 and exact; the rest is in float32 (float64 for a float64 result), in the order written.
Why:     in ResQ the product of a low and a high part vanishes (arXiv:2412.14363, equation 4): operands meet their own kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.integer_matmul import int_matmul
from mmqc.ops.pack import check_packed, unpack
from mmqc.ops.quantize_per_token import check_parts


def check(
    x_q: Tensor,
    x_scale: Tensor,
    x_offset: Tensor,
    w_q: Sequence[Tensor],
    w_scale: Tensor,
    w_sum: Tensor,
    widths: Sequence[int],
    weight_bits: Sequence[int],
) -> None:
    """Raise unless the operands fit each other."""
    check_parts(x_q.shape[-1], widths, weight_bits)
    if len(w_q) != len(widths):
        raise ValueError(f"{len(widths)} parts, but {len(w_q)} weights")
    for w, width, bits in zip(w_q, widths, weight_bits, strict=True):
        if bits not in (4, 8):
            raise ValueError(f"weight_bits = {bits}: with quantized inputs a weight is stored in 4 or 8 bits")
        check_packed(w, width, bits)
    rows, parts = (*x_q.shape[:-1], len(widths)), (w_q[0].shape[0], len(widths))
    for name, tensor, shape in (
        ("x_scale", x_scale, rows),
        ("x_offset", x_offset, rows),
        ("w_scale", w_scale, parts),
        ("w_sum", w_sum, parts),
    ):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(shape)}, not {list(tensor.shape)}")
    if x_q.dtype != torch.int8:
        raise ValueError(f"x_q is int8, not {x_q.dtype}")


def reference(
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
    """The formula, part after part."""
    check(x_q, x_scale, x_offset, w_q, w_scale, w_sum, widths, weight_bits)
    dtype = torch.promote_types(out_dtype, torch.float32)
    rows = x_q.reshape(-1, x_q.shape[-1]).split(list(widths), -1)
    s_x, o_x = (t.reshape(-1, len(widths)).to(dtype) for t in (x_scale, x_offset))
    s_w = w_scale.to(dtype)
    y = torch.zeros((), dtype=dtype, device=x_q.device)
    for p, (x, w, width, bits) in enumerate(zip(rows, w_q, widths, weight_bits, strict=True)):
        acc = int_matmul(x, unpack(w, width, bits)).to(dtype)
        y = y + (acc * s_x[:, p, None] * s_w[:, p] + o_x[:, p, None] * (s_w[:, p] * w_sum[:, p].to(dtype)))
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(out_dtype).reshape(*x_q.shape[:-1], w_scale.shape[0])


def fake(
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
    """[..., N] in out_dtype."""
    del bias
    check(x_q, x_scale, x_offset, w_q, w_scale, w_sum, widths, weight_bits)
    return x_q.new_empty((*x_q.shape[:-1], w_scale.shape[0]), dtype=out_dtype)


define(
    "mixed_matmul(Tensor x_q, Tensor x_scale, Tensor x_offset, Tensor[] w_q, Tensor w_scale, Tensor w_sum, Tensor? bias, "
    "int[] widths, int[] weight_bits, ScalarType out_dtype) -> Tensor",
    reference,
    fake,
)
