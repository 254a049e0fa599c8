"""The linears of all experts in one launch (ops/grouped_matmul.py); rows are sorted by expert, experts may have none.

    y[s] = x[s] W_eᵀ + b[e]        y[s] = (x_q[s] w_q[e]ᵀ) s_x[s] s_w[e] + b[e]        o[e] <= s < o[e + 1]

Shapes:  x [S, K] fp16 | bf16 | fp32 (interpreter), or x_q int8 and s_x float32 [S]   w_q int8 [E, N, K] or uint8 (ops/pack.py)
         s_w float [E, N] or [E, N, ceil(K/g)]   z int8 or float16 like s_w, of weights that meet floating-point x
         b [E, N]   o int32 | int64 [E + 1]   y [S, N]
Grid:    S // BM + min(E + 1, S) tiles of rows, the most that any distribution of S rows over the experts needs, times the tiles
         of columns: it follows from shapes, so the launch fits a CUDA graph.
Exact:   as scaled_matmul.py (integer) and weight_only_matmul.py say of a single linear.
Arch:    Ampere and newer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.grouped_matmul_tiles import grouped_matmul_kernel
from mmqc.kernels.matmul.scaled_matmul import MAX_K, OUT_DTYPES
from mmqc.kernels.matmul.weight_only_matmul import DTYPES, step, whole_steps
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx, why_not_here
from mmqc.ops.pack import packed_width, stretch
from mmqc.ops.weight_only_matmul import ZEROS

MAX_EXPERTS = 4095  # offsets that a program reads at once


def supports(
    x: Tensor, w_q: Tensor, w_scale: Tensor, offsets: Tensor, bias: Tensor | None, row_scale: Tensor | None, bits: int,
    group_size: int, out_dtype: torch.dtype, zero: Tensor | None = None,
) -> str | None:
    """None, or why these operands, which fit each other, cannot be multiplied here."""
    integer = row_scale is not None
    checks = (
        (integer or x.dtype in DTYPES, f"x is int8 or one of {list(DTYPES)}, not {x.dtype}"),
        (integer or out_dtype == x.dtype, f"the result is {x.dtype} like x, not {out_dtype}"),
        (out_dtype in OUT_DTYPES, f"out_dtype is one of {OUT_DTYPES}, not {out_dtype}"),
        (w_q.shape[2] == packed_width(x.shape[1], bits), f"w_q has {w_q.shape[2]} columns for inputs of width {x.shape[1]}"),
        (1 <= x.shape[1] <= MAX_K, f"K = {x.shape[1]}: 1 to {MAX_K}"),
        (w_q.shape[0] <= MAX_EXPERTS, f"{w_q.shape[0]} experts: at most {MAX_EXPERTS}"),
        (w_q.is_contiguous() and w_scale.is_contiguous() and offsets.is_contiguous(), "weights, scales, offsets are contiguous"),
        (w_scale.is_floating_point(), f"w_scale is floating point, not {w_scale.dtype}"),
        (zero is None or (zero.is_contiguous() and zero.dtype in ZEROS), "zero points are contiguous int8 or float16"),
        (bias is None or bias.is_contiguous(), "bias is contiguous"),
        (row_scale is None or (row_scale.is_contiguous() and row_scale.dtype == torch.float32),
         "row_scale is contiguous float32"),
        (x.shape[0] < 2**31 - 2**16, "rows are counted with 32 bits"),
    )
    reason = next((why for ok, why in checks if not ok), None)
    return reason or why_not_here(x, w_q, w_scale, offsets, bias, row_scale, zero)


def table(rows: int, experts: int, bits: int, integer: bool) -> MatmulConfig:
    """A config from rules of thumb: tiles as high as an expert's rows, if all have as many."""
    each = ceil_div(rows, max(experts, 1))
    block_m = 16 if each <= 16 else 32 if each <= 32 else 64 if each <= 64 else 128
    if block_m <= 32:
        return MatmulConfig(block_m, 64, 128, 4, 3, variant="columns")
    return MatmulConfig(block_m, 128, 64, 4 if block_m == 64 else 8, 3, variant="columns")


def grouped_matmul(
    x: Tensor, w_q: Tensor, w_scale: Tensor, offsets: Tensor, bias: Tensor | None = None,
    row_scale: Tensor | None = None, *, bits: int, group_size: int = 0, out_dtype: torch.dtype | None = None,
    zero: Tensor | None = None, out: Tensor | None = None, config: MatmulConfig | None = None,
) -> Tensor:
    """Multiply; every row of the result is written, those of no expert with 0."""
    dtype = out_dtype or (x.dtype if row_scale is None else torch.bfloat16)
    reason = supports(x, w_q, w_scale, offsets, bias, row_scale, bits, group_size, dtype, zero)
    if reason is not None:
        raise ValueError(f"grouped_matmul: {reason}")
    (rows, k), (experts, n, _) = x.shape, w_q.shape
    y = torch.empty(rows, n, dtype=dtype, device=x.device) if out is None else out
    if not rows or not n:
        return y
    x = x if x.stride(1) == 1 or k == 1 else x.contiguous()
    integer = row_scale is not None
    c = config or table(rows, experts, bits, integer)
    stored, (block_k, aligned, stages) = stretch(k, bits), step(k, bits, group_size, w_scale, c, staged=32)
    tiles = (rows // c.block_m + min(experts + 1, rows)) * ceil_div(n, c.block_n)
    grouped_matmul_kernel[(tiles,)](
        x, w_q, y, w_scale, w_scale if zero is None else zero, y if bias is None else bias,
        w_scale if row_scale is None else row_scale, offsets,
        rows, n, k, stored, w_scale.shape[2] if group_size else 1, experts, x.stride(0), w_q.stride(0), w_q.stride(1),
        y.stride(0), INTEGER=integer, GROUP=group_size, ALIGNED=aligned, HAS_ZERO=zero is not None,
        HAS_BIAS=bias is not None, BITS=bits, EVEN_K=whole_steps(k, bits, block_k),
        PTX=has_inline_ptx(x.device), DTYPE=DTYPES.get(x.dtype, tl.float16),
        BLOCK_E=triton.next_power_of_2(experts + 1), BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=block_k,
        num_warps=c.num_warps, num_stages=stages, enable_fp_fusion=True,
    )
    return y
