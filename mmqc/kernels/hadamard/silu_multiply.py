"""h = silu(x) ∘ u, elementwise, rounded as in front of a transform (``input_tile``).

Shapes:  x, u, h [M, n] fp16 | bf16 | fp32, rows contiguous
Bytes:   two reads and one write of every element; bandwidth-bound.
Arch:    Ampere and newer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.activation_tiles import input_tile
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx
from mmqc.kernels.shared.launch import Launch

BLOCK = 2048
NUM_STAGES = 3  # Triton's own


@triton.jit
def silu_multiply_kernel(x_ptr, up_ptr, y_ptr, n, stride_x, stride_up, BLOCK: tl.constexpr, PTX: tl.constexpr):
    """A part of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = input_tile(x_ptr, up_ptr, row * stride_x + at, row * stride_up + at, at < n, True, PTX)
    tl.store(y_ptr + row * n + at, h, mask=at < n)


def launch(x: Tensor, up: Tensor, y: Tensor) -> Launch:
    """Fill ``y`` with silu(x) * up; the operands are those of hadamard_quantize."""
    m, n = x.shape
    args = dict(x_ptr=x, up_ptr=up, y_ptr=y, n=n, stride_x=x.stride(0), stride_up=up.stride(0))
    constants = dict(BLOCK=BLOCK, PTX=has_inline_ptx(x.device) and x.dtype != torch.float32)
    return Launch(silu_multiply_kernel, (m, ceil_div(n, BLOCK)), args, constants, ("y_ptr",), 8, NUM_STAGES)
