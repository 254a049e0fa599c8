"""The ops' implementation on CUDA: importing this file registers it; what a kernel cannot take goes to the reference.

    mmqc::scaled_matmul, mmqc::weight_only_matmul   on CUDA   ->  the Triton kernels, rows flattened

``why_not_scaled`` and ``why_not_weight_only`` say what a kernel cannot take; a compiled graph's record repeats it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.kernels import scaled_matmul as scaled
from mmqc.kernels import weight_only_matmul as weight_only
from mmqc.ops import scaled_matmul as scaled_op
from mmqc.ops import weight_only_matmul as weight_only_op


def _matrix(x: Tensor) -> Tensor:
    """[..., K] as rows; a copy only if its rows are not contiguous."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def why_not_scaled(
    x_q: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, out_dtype: torch.dtype
) -> str | None:
    """None, or why the kernel cannot take these operands."""
    if (weight_bits == 4) != (w_q.dtype == torch.uint8):
        return f"{weight_bits} bits are stored as {w_q.dtype}"
    return scaled.supports(_matrix(x_q), w_q, w_scale, bias, out_dtype)


def scaled_matmul(
    x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, visual: Tensor | None,
    weight_bits: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``mmqc::scaled_matmul`` on CUDA."""
    scaled_op.check(x_q, w_q, x_scale, w_scale, visual, weight_bits)
    if why_not_scaled(x_q, w_q, w_scale, bias, weight_bits, out_dtype) is not None:
        return scaled_op.reference(x_q, w_q, x_scale, w_scale, bias, visual, weight_bits, out_dtype)
    rows = x_q.shape[:-1]
    mask = None if visual is None else visual.expand(rows).reshape(-1)
    y = scaled.scaled_matmul(_matrix(x_q), w_q, x_scale.float(), w_scale, bias, visual=mask, out_dtype=out_dtype)
    return y.view(*rows, w_q.shape[0])


def why_not_weight_only(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int
) -> str | None:
    """None, or why the kernel cannot take these operands."""
    if x.dtype == torch.float32:
        return "float32 activations are multiplied in float32"
    if (weight_bits == 4) != (w_q.dtype == torch.uint8):
        return f"{weight_bits} bits are stored as {w_q.dtype}"
    return weight_only.supports(_matrix(x), w_q, w_scale, bias, group_size, None)


def weight_only_matmul(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, weight_bits: int, group_size: int
) -> Tensor:
    """``mmqc::weight_only_matmul`` on CUDA."""
    weight_only_op.check(x, w_q, w_scale, weight_bits, group_size)
    if why_not_weight_only(x, w_q, w_scale, bias, weight_bits, group_size) is not None:
        return weight_only_op.reference(x, w_q, w_scale, bias, weight_bits, group_size)
    y = weight_only.weight_only_matmul(_matrix(x), w_q, w_scale, bias, group_size=group_size)
    return y.view(*x.shape[:-1], w_q.shape[0])


torch.library.impl("mmqc::scaled_matmul", "CUDA", scaled_matmul)
torch.library.impl("mmqc::weight_only_matmul", "CUDA", weight_only_matmul)
