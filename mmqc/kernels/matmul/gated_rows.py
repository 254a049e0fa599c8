"""What follows gate and up, in a pass of its own over what their products have written.

    y = f(z_0) ∘ z_1,  or its codes          z [M, N] fp16 | bf16 | fp32,  y in the same dtype or int8

Where:   more rows than packed_gated.py takes, of weights that stay packed: their tiles lie across y, and would read a gate little
         by little (scaled_matmul_epilogue.py).
Bytes:   both z are read once, y is written once.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.gated_matmul_tiles import finish_gated_tile
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx
from mmqc.kernels.shared.launch import Launch

BLOCK_M, BLOCK_N = 4, 1024


@triton.jit
def gated_rows_kernel(
    z_ptr, z1_ptr, y_ptr, next_scale_ptr, next_row_ptr, M, N, stride_z, stride_z1, stride_y, ACTIVATION: tl.constexpr,
    NEXT: tl.constexpr, NEXT_KIND: tl.constexpr, ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PTX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """A tile of y."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < M
    mask, wide = row_mask[:, None] & (cols < N)[None, :], rows.to(tl.int64)[:, None]
    g = tl.load(z_ptr + wide * stride_z + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    u = tl.load(z1_ptr + wide * stride_z1 + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    y = finish_gated_tile(g, u, next_scale_ptr, next_row_ptr, rows, row_mask, ACTIVATION, NEXT, NEXT_KIND, ROUND, LOW, HIGH, PTX)
    tl.store(y_ptr + wide * stride_y + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def launch(gate: Tensor, up: Tensor, y: Tensor, epilogue: Epilogue) -> Launch:
    """Fill y from both z [M, N], rows contiguous."""
    m, n = y.shape
    args = dict(
        z_ptr=gate, z1_ptr=up, y_ptr=y, **epilogue.args(gate), M=m, N=n, stride_z=gate.stride(0), stride_z1=up.stride(0),
        stride_y=y.stride(0),
    )
    constants = dict(**epilogue.constants(), PTX=has_inline_ptx(y.device), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    grid = (ceil_div(n, BLOCK_N), ceil_div(m, BLOCK_M))
    return Launch(gated_rows_kernel, grid, args, constants, ("y_ptr",), 4, 1)
