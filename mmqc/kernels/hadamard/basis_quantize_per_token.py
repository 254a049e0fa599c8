"""Multiplication by a basis and per-token asymmetric quantization in one or two parts: keys behind RoPE, into U_C.

    y = x U                    (rounded to x's dtype)            q, s, o = quantize_per_token(y, K_p, bits)

Shapes:  x [M, D] fp16 | bf16 | fp32   U [D, D]   q int8 [M, D]   s, o float32 [M, P]   D <= 256: of one head
How:     a program multiplies some tokens by U, padded to powers of two, in as few steps along D as its shared memory holds; the
         parts are masks over the same tile.
Bytes:   3 D a token in 16 bits; the product and the quantization one by one, 7 D.
Arch:    Ampere and newer; float32 in the interpreter and on tensor cores as ieee.
"""

# Tuples are compiled, not run.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx, shared_bytes, why_not_here
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import New, Plan, Refusal, first_reason, rows_like, why_not_rows
from mmqc.kernels.shared.quantize_codes import byte_of, divide_tile, round_tile
from mmqc.kernels.shared.row_scale import Rows

MAX_WIDTH = 256
TOKENS = 64  # of a program, or LEAST_TOKENS where there are no more
LEAST_TOKENS = 16  # that tensor cores take
BESIDE = 4096  # bytes that sums over a token take


@triton.jit
def part_scale(y, inside, before, BITS: tl.constexpr, LEAST: tl.constexpr):
    """Smallest entry and scale of the columns ``inside``; the scale is at least LEAST times the one before."""
    low = tl.min(tl.where(inside, y, float("inf")), 1)
    high = tl.max(tl.where(inside, y, float("-inf")), 1)
    s = tl.div_rn(high - low, tl.zeros_like(low) + (2.0**BITS - 1.0))
    return low, tl.maximum(s, before * LEAST)


@triton.jit
def basis_quantize_per_token_kernel(
    x_ptr, basis_ptr, q_ptr, scale_ptr, offset_ptr, M, D, LOW, stride_x, stride_i, stride_j, PARTS: tl.constexpr,
    LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """BLOCK tokens."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, WIDTH)
    wide = rows.to(tl.int64)[:, None]
    there, inside = (rows < M)[:, None] & (c < D)[None, :], (c < D)[None, :]
    acc = tl.zeros((BLOCK, WIDTH), tl.float32)
    for step in tl.static_range(WIDTH // STEP):
        k = step * STEP + tl.arange(0, STEP)
        x = tl.load(x_ptr + wide * stride_x + k[None, :], mask=(rows < M)[:, None] & (k < D)[None, :], other=0.0)
        u = tl.load(basis_ptr + k[:, None] * stride_i + c[None, :] * stride_j, mask=(k < D)[:, None] & inside, other=0.0)
        acc = tl.dot(x, u, acc, input_precision="ieee")
    y = round_tile(acc, x_ptr.dtype.element_ty, PTX)
    of_low = (c < LOW)[None, :]
    low, s = part_scale(y, of_low, 0.0, LOW_BITS, 1.0)
    tl.store(scale_ptr + rows * PARTS, s, mask=rows < M)
    tl.store(offset_ptr + rows * PARTS, low + s * 2.0 ** (LOW_BITS - 1), mask=rows < M)
    first, step = low[:, None] + tl.zeros_like(y), s[:, None] + tl.zeros_like(y)
    half = tl.full((1, WIDTH), -(2.0 ** (LOW_BITS - 1)), tl.float32)
    if PARTS == 2:
        low, s = part_scale(y, inside & (c >= LOW)[None, :], s, HIGH_BITS, 2.0 ** (LOW_BITS - HIGH_BITS - 1))
        tl.store(scale_ptr + rows * PARTS + 1, s, mask=rows < M)
        tl.store(offset_ptr + rows * PARTS + 1, low + s * 2.0 ** (HIGH_BITS - 1), mask=rows < M)
        first, step = tl.where(of_low, first, low[:, None]), tl.where(of_low, step, s[:, None])
        half = tl.where(of_low, half, -(2.0 ** (HIGH_BITS - 1)))
    u = divide_tile(y - first, tl.where(step > 0.0, step, 1.0))
    tl.store(q_ptr + wide * D + c[None, :], byte_of(u, half), mask=there)


def why_not(x: Tensor, basis: Tensor, widths: Sequence[int], bits: Sequence[int]) -> str | None:
    """None, or why these operands cannot be turned and quantized here."""
    if reason := why_not_rows(x, MAX_WIDTH):
        return reason
    width = x.shape[1]
    checks = (
        (tuple(basis.shape) == (width, width) and basis.dtype == x.dtype, f"basis is {x.dtype} [{width}, {width}]"),
        (len(widths) in (1, 2) and len(bits) == len(widths) and sum(widths) == width and min(widths) > 0,
         f"one or two parts, not {list(widths)}"),
        (all(2 <= b <= 8 for b in bits), f"bits = {list(bits)}: 2 to 8"),
    )
    return first_reason(checks) or why_not_here(x, basis)


def step_of(width: int, block: int, item_bytes: int, room: int) -> int:
    """Rows of U, and columns of x, that are in shared memory at once."""
    step = width
    while step > LEAST_TOKENS and (width + block) * step * item_bytes > room - BESIDE:
        step //= 2
    return step


def plan(
    x: Tensor, basis: Tensor, widths: Sequence[int], bits: Sequence[int], new: New | None = None
) -> Plan[Rows] | Refusal:
    """One launch, of a program for some tokens."""
    if reason := why_not(x, basis, widths, bits):
        return Refusal(reason)
    m, width = x.shape
    out = Rows.new(new or rows_like(x), width, len(widths))
    padded = max(16, triton.next_power_of_2(width))
    block = LEAST_TOKENS if m <= LEAST_TOKENS else TOKENS
    args = dict(
        x_ptr=x, basis_ptr=basis, q_ptr=out.q, scale_ptr=out.scale, offset_ptr=out.offset, M=m, D=width, LOW=widths[0],
        stride_x=x.stride(0), stride_i=basis.stride(0), stride_j=basis.stride(1),
    )
    constants = dict(
        PARTS=len(widths), LOW_BITS=bits[0], HIGH_BITS=bits[-1], PTX=has_inline_ptx(x.device), BLOCK=block, WIDTH=padded,
        STEP=step_of(padded, block, x.dtype.itemsize, shared_bytes(x.device)),
    )
    warps, grid, written = 8 if padded * block > 8192 else 4, (ceil_div(m, block),), ("q_ptr", "scale_ptr", "offset_ptr")
    launch = Launch(basis_quantize_per_token_kernel, grid, args, constants, written, warps, 1, block_rows=block)
    return Plan((launch,), out)
