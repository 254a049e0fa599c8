"""Static quantization of what is in memory already, such as the output of attention: a tile of rows a program.

    q = clamp(round(x / s(m)))                      (ops/quantize.py, row_scale.py)

Shapes:  x [M, D] fp16 | bf16 | fp32   q [M, D] int8 | fp8e4nv
Bytes:   one read and one write of every element; bandwidth-bound.
Why:     Inductor's pointwise kernel stores 2 or 4 bytes a thread; here a thread has 16 codes side by side.
Arch:    Ampere and newer; fp8 from compute capability 8.9.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import ceil_div, fp8_reason, why_not_here
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import ROW_DTYPES, New, Plan, Refusal, first_reason, rows_like
from mmqc.kernels.shared.quantize_codes import quantize_tile
from mmqc.kernels.shared.row_scale import RowScale, row_scale_tile

CODES = (torch.int8, torch.float8_e4m3fn)
TILE, WARPS = 4096, 4  # 32 entries a thread
WIDTHS = (2048, 1024, 512, 256, 128)  # of a tile


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, row_ptr, M, D, stride_x, KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """A tile of q."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (at < D)[None, :]
    wide = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + wide * stride_x + at[None, :], mask=mask, other=0.0).to(tl.float32)
    s = row_scale_tile(scale_ptr, row_ptr, rows, rows < M, KIND)[:, None]
    tl.store(q_ptr + wide * D + at[None, :], quantize_tile(x, s, LOW, HIGH, FP8), mask=mask)


def width_of_tile(width: int) -> int:
    """The one that covers rows with the fewest entries beside them."""
    return min(WIDTHS, key=lambda block: (ceil_div(width, block) * block, -block))


def why_not(x: Tensor, bits: int = 8, code: torch.dtype = torch.int8) -> str | None:
    """None, or why rows of x cannot be quantized here."""
    checks = (
        (len(x.shape) == 2, f"x is a matrix, not {list(x.shape)}"),
        (x.dtype in ROW_DTYPES, f"x is one of {ROW_DTYPES}, not {x.dtype}"),
        (x.stride(-1) == 1 or x.shape[-1] == 1, "rows of x are contiguous"),
        (code in CODES, f"codes are one of {CODES}, not {code}"),
        (2 <= bits <= 8, f"bits = {bits}: 2 to 8"),
    )
    reason = first_reason(checks) or why_not_here(x)
    return fp8_reason(x.device) if reason is None and code != torch.int8 else reason


def plan(
    x: Tensor, scales: RowScale, bits: int = 8, code: torch.dtype = torch.int8, new: New | None = None
) -> Plan[Tensor] | Refusal:
    """One launch."""
    if reason := why_not(x, bits, code):
        return Refusal(reason)
    (m, width), q = x.shape, (new or rows_like(x))(x.shape[1], code)
    block_n = width_of_tile(width)
    block_m = TILE // block_n
    args = dict(x_ptr=x, q_ptr=q, scale_ptr=scales.scale, row_ptr=scales.rows, M=m, D=width, stride_x=x.stride(0))
    constants = dict(
        KIND=scales.kind, LOW=-(2.0 ** (bits - 1)), HIGH=2.0 ** (bits - 1) - 1, FP8=code != torch.int8, BLOCK_M=block_m,
        BLOCK_N=block_n,
    )
    grid = (ceil_div(m, block_m), ceil_div(width, block_n))
    return Plan((Launch(quantize_kernel, grid, args, constants, ("q_ptr",), WARPS, 1, block_rows=block_m),), q)
