"""A linear whose weight alone is quantized, to floats of 4 bits (ops/float4_matmul.py).

    y = x Wᵀ + b        mxfp4  W[n, k] = e2m1[n, k] 2^(s[n, k // 32] - 127)        nvfp4  W[n, k] = e2m1[n, k] s[n, k // 16] / d

Shapes:  x [M, K] fp16 | bf16 | fp32 (interpreter)   w_q uint8 [N, ceil(K/2)]   s uint8 [N, ceil(K/B)]   d float32 [1] or none
         b [N]   y [M, N] in x's dtype
M:       to some hundred rows the weight is unpacked in registers, by the tiles of 4-bit integers; above, it is written out once
         in x's dtype and multiplied by torch.
Exact:   in registers e2m1 times the block's scale is exact and d divides the float32 sum: closer to the formula than the op,
         which rounds the weight to x's dtype first.  Written out, it is rounded as by the op.
Tiles:   as in weight_only_matmul_tiles.py the weight is the first operand.  A product e2m1 · s has six bits at most, so that it is
         exact in bf16, and in fp16 where it is no subnormal; sums are float32.
Arch:    Ampere and newer; Hopper has no products of 4-bit floats, so that what this saves is memory and its traffic.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.matmul import configs
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.scaled_matmul import OUTPUTS
from mmqc.kernels.matmul.weight_only_matmul import DTYPES
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx, why_not_here
from mmqc.kernels.shared.float4_codes import float4_as_float, scale_tile
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.load_tile import load_w_tile, load_x_tile
from mmqc.kernels.shared.program_order import grouped_tile
from mmqc.kernels.shared.split_k import add_parts, store_part, workspace
from mmqc.ops.pack import packed_width
from mmqc.specs import BLOCKS

OP = "weight_int4"  # whose tiles are taken: as many bytes of weight, and as wide operands


@triton.jit
def times_scale_tile(
    w, scale_rows, first, GROUPS,
    BLOCK: tl.constexpr, E8M0: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """W [BN, BK] of the columns from ``first`` on, times their blocks' scales; scale_rows [BN, 1] point to the rows' first ones.

    WHOLE: the columns are whole blocks, whose scales are loaded once each.
    """
    if WHOLE:
        at = first // BLOCK + tl.arange(0, BLOCK_K // BLOCK)
        scale = scale_tile(tl.load(scale_rows + tl.minimum(at, GROUPS - 1)[None, :]), E8M0).to(w.dtype)  # [BN, BK / B]
        parts = tl.reshape(w, (BLOCK_N, BLOCK_K // BLOCK, BLOCK)) * scale[:, :, None]
        scaled = tl.reshape(parts, (BLOCK_N, BLOCK_K))
    else:
        at = tl.minimum((first + tl.arange(0, BLOCK_K)) // BLOCK, GROUPS - 1)
        scaled = w * scale_tile(tl.load(scale_rows + at[None, :]), E8M0).to(w.dtype)
    return scaled


@triton.jit
def store_product_tile(acc, y_ptr, divisor_ptr, bias_ptr, rows, cols, M, N, stride_y, DIVIDE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The epilogue: acc [BM, BN] over the tensor's divisor, plus the bias."""
    col_mask = cols < N
    if DIVIDE:
        acc = acc * tl.div_rn(1.0, tl.load(divisor_ptr))
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    at = y_ptr + rows.to(tl.int64)[:, None] * stride_y + cols[None, :]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(rows < M)[:, None] & col_mask[None, :])


@triton.jit
def float4_matmul_kernel(
    x_ptr, w_ptr, y_ptr, scale_ptr, divisor_ptr, bias_ptr, part_ptr, counter_ptr,
    M, N, K, STORED, GROUPS, stride_x, stride_w, stride_y,
    BLOCK: tl.constexpr, E8M0: tl.constexpr, WHOLE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    PTX: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
):
    """One tile of y, or of one part of K.  STORED: bytes in a row of w, which are columns of a stretch (ops/pack.py)."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.minimum(cols, N - 1).to(tl.int64)[:, None]  # columns past N repeat the last one; the store drops them
    w_rows, scale_rows = w_ptr + safe * stride_w, scale_ptr + safe * GROUPS
    x_rows, row_mask = x_ptr + rows.to(tl.int64)[:, None] * stride_x, rows[:, None] < M
    steps = tl.cdiv(tl.cdiv(STORED, BLOCK_K), splits)
    first, last = split * steps * BLOCK_K, tl.minimum((split + 1) * steps * BLOCK_K, STORED)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        packed = load_w_tile(w_rows, k, STORED, EVEN_K)  # [BN, BK]
        x = load_x_tile(x_rows, k, row_mask, tl.minimum(STORED, K), EVEN_K)  # [BM, BK]
        x_high = load_x_tile(x_rows, k + STORED, row_mask, K, EVEN_K)
        w, w_high = float4_as_float(packed, DTYPE, PTX)
        w = times_scale_tile(w, scale_rows, start, GROUPS, BLOCK, E8M0, WHOLE, BLOCK_N, BLOCK_K)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
        w = times_scale_tile(w_high, scale_rows, start + STORED, GROUPS, BLOCK, E8M0, WHOLE, BLOCK_N, BLOCK_K)
        acc = tl.dot(w, x_high.T, acc, input_precision="ieee")
    acc = tl.trans(acc)
    if not SPLIT:
        store_product_tile(acc, y_ptr, divisor_ptr, bias_ptr, rows, cols, M, N, stride_y, not E8M0, HAS_BIAS)
    else:
        tiles = tiles_m * tiles_n
        done = store_part(part_ptr, counter_ptr, acc, tile, tiles, split, BLOCK_M, BLOCK_N)
        if done == splits - 1:
            total = add_parts(part_ptr, counter_ptr, tile, tiles, splits, BLOCK_M, BLOCK_N)
            store_product_tile(total, y_ptr, divisor_ptr, bias_ptr, rows, cols, M, N, stride_y, not E8M0, HAS_BIAS)


@triton.jit
def write_float4_kernel(
    w_ptr, out_ptr, scale_ptr, divisor_ptr, N, K, STORED, GROUPS,
    BLOCK: tl.constexpr, E8M0: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """BLOCK_K stored bytes of one row -> its numbers in out's dtype, by way of float32."""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    packed = tl.load(w_ptr + n * STORED + at, mask=at < STORED, other=0)
    low, high = float4_as_float(packed, tl.float32, False)  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
    for t in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        k, number = at + t * STORED, low if t == 0 else high
        scale = scale_tile(tl.load(scale_ptr + n * GROUPS + tl.minimum(k // BLOCK, GROUPS - 1)), E8M0)
        if not E8M0:
            scale = tl.div_rn(scale, tl.zeros_like(scale) + tl.load(divisor_ptr))
        tl.store(out_ptr + n * K + k, (number * scale).to(out_ptr.dtype.element_ty), mask=(at < STORED) & (k < K))


def supports(x: Tensor, w_q: Tensor, w_scale: Tensor, divisor: Tensor | None, bias: Tensor | None, form: str) -> str | None:
    """None, or why these operands cannot be multiplied here."""
    if x.dim() != 2 or w_q.dim() != 2:
        return f"x and w_q are matrices, not {list(x.shape)} and {list(w_q.shape)}"
    if form not in BLOCKS:
        return f"form = {form!r}: one of {sorted(BLOCKS)}"
    k, (n, stored), groups = x.shape[1], w_q.shape, -(-x.shape[1] // BLOCKS[form])
    checks = (
        (x.dtype in DTYPES, f"x is one of {list(DTYPES)}, not {x.dtype}"),
        (w_q.dtype == torch.uint8 and w_scale.dtype == torch.uint8, "w_q and w_scale are bytes"),
        (k > 0 and stored == packed_width(k, 4), f"w_q has {stored} columns for inputs of width {k}"),
        (w_scale.shape == (n, groups) and w_scale.is_contiguous(), f"w_scale is contiguous [{n}, {groups}]"),
        ((divisor is None) == (form == "mxfp4"), "nvfp4 has a divisor, mxfp4 none"),
        (divisor is None or (divisor.shape == (1,) and divisor.dtype == torch.float32), "divisor is float32 [1]"),
        (bias is None or bias.shape == (n,), f"bias is [{n}]"),
        ((x.stride(1) == 1 or k == 1) and w_q.is_contiguous(), "rows of x are contiguous, and w_q is"),
    )
    return next((why for ok, why in checks if not ok), None) or why_not_here(x, w_q, w_scale, divisor, bias)


def float4_matmul(
    x: Tensor, w_q: Tensor, w_scale: Tensor, divisor: Tensor | None = None, bias: Tensor | None = None, *, form: str,
    out: Tensor | None = None, config: MatmulConfig | None = None,
) -> Tensor:
    """Multiply."""
    reason = supports(x, w_q, w_scale, divisor, bias, form)
    if reason is not None:
        raise ValueError(f"float4_matmul: {reason}")
    (m, k), n = x.shape, w_q.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device) if out is None else out
    if y.shape != (m, n) or y.dtype != x.dtype or (n > 1 and y.stride(1) != 1):
        raise ValueError(f"float4_matmul: out is {x.dtype} [{m}, {n}], rows contiguous; got {y.dtype} {list(y.shape)}")
    if not m or not n:
        return y
    c = config or configs.config(OP, m, n, k, x.device)
    if c.variant != "unpack":
        launch(x, w_q, w_scale, divisor, bias, y, form, c).run()
        return y
    w = write_out(w_q, w_scale, divisor, k, form, x.dtype)
    return torch.mm(x, w.t(), out=y) if bias is None else torch.addmm(bias.to(x.dtype), x, w.t(), out=y)


def launch(
    x: Tensor, w_q: Tensor, w_scale: Tensor, divisor: Tensor | None, bias: Tensor | None, y: Tensor, form: str, c: MatmulConfig
) -> Launch:
    """The product from packed codes."""
    (m, k), (n, stored), block = x.shape, w_q.shape, BLOCKS[form]
    block_k = min(64, max(32, c.block_k))
    whole = stored % block == 0  # then blocks of the second stretch begin where steps do
    tiles = ceil_div(m, c.block_m) * ceil_div(n, c.block_n)
    parts, counters = workspace(x.device, tiles, c.block_m * c.block_n, c.split_k, torch.float32)
    args = dict(
        x_ptr=x, w_ptr=w_q, y_ptr=y, scale_ptr=w_scale, divisor_ptr=x if divisor is None else divisor,
        bias_ptr=y if bias is None else bias, part_ptr=parts, counter_ptr=counters, M=m, N=n, K=k, STORED=stored,
        GROUPS=w_scale.shape[1], stride_x=x.stride(0), stride_w=stored, stride_y=y.stride(0),
    )
    constants = dict(
        BLOCK=block, E8M0=form == "mxfp4", WHOLE=whole, HAS_BIAS=bias is not None,
        EVEN_K=stored % block_k == 0 and 2 * stored == k, PTX=has_inline_ptx(x.device), DTYPE=DTYPES[x.dtype],
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=block_k, GROUP_M=c.group_m, SPLIT=c.split_k > 1,
    )
    return Launch(float4_matmul_kernel, (tiles, c.split_k), args, constants, OUTPUTS, c.num_warps, c.num_stages, c.block_m)


def write_out(w_q: Tensor, w_scale: Tensor, divisor: Tensor | None, k: int, form: str, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in ``dtype``."""
    n, stored = w_q.shape
    out = torch.empty(n, k, dtype=dtype, device=w_q.device)
    block_k = min(2048, max(16, triton.next_power_of_2(stored)))
    args = dict(
        w_ptr=w_q, out_ptr=out, scale_ptr=w_scale, divisor_ptr=out if divisor is None else divisor, N=n, K=k, STORED=stored,
        GROUPS=w_scale.shape[1],
    )
    constants = dict(BLOCK=BLOCKS[form], E8M0=form == "mxfp4", BLOCK_K=block_k)
    Launch(write_float4_kernel, (n, ceil_div(stored, block_k)), args, constants, ("out_ptr",), 4, 3).run()
    return out
