"""h = silu(x) ∘ u, elementwise, rounded as in front of a transform (``input_tile``).

Shapes:  x, u, h [M, n] fp16 | bf16 | fp32, rows contiguous
Bytes:   two reads and one write of every element; bandwidth-bound.
Arch:    Ampere and newer.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.activation_tiles import input_tile
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx

BLOCK = 2048


@triton.jit
def silu_multiply_kernel(x_ptr, up_ptr, y_ptr, n, stride_x, stride_up, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """A part of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = input_tile(x_ptr, up_ptr, row * stride_x + at, row * stride_up + at, at < n, True, PTX)
    tl.store(y_ptr + row * n + at, h, mask=at < n)


def silu_multiply(x: Tensor, up: Tensor) -> Tensor:
    """silu(x) * up; the operands are those of hadamard_quantize."""
    m, n = x.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    ptx = has_inline_ptx(x.device) and x.dtype != torch.float32
    silu_multiply_kernel[(m, ceil_div(n, BLOCK))](
        x, up, y, n, x.stride(0), up.stride(0), BLOCK=BLOCK, PTX=ptx, num_warps=8
    )
    return y
