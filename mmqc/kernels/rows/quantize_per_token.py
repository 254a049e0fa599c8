"""Per-token asymmetric quantization in one or two precisions: a row in registers.

    s = (max x - min x) / (2^b - 1)     q = round((x - min x) / s) - 2^(b-1)     o = min x + 2^(b-1) s
    for the first L channels with b = bits[0] and for the others with b = bits[1]         (ops/quantize_per_token.py)

Shapes:  x [M, D] fp16 | bf16 | fp32   q int8 [M, D]   s, o float32 [M, P]   D <= 65,536
How:     a part is one to three tiles of powers of two, all but the last of them full, so that little is computed for channels
         that are not its own; a lane holds up to 160 channels, so that few barriers stand between a row's arrival and its codes.
Bytes:   one read and one write of every element; bandwidth-bound as long as an element costs no more than about 20 instructions.
Arch:    Ampere and newer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import power_of_two, why_not_here
from mmqc.kernels.shared.early_start import await_inputs, starts_early
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import New, Plan, Refusal, first_reason, rows_like, warps_of_row, why_not_rows
from mmqc.kernels.shared.quantize_codes import byte_of, divide_tile
from mmqc.kernels.shared.row_scale import Rows

LANE = 160  # channels of a lane, at most: one warp a row of 4,096, four for 18,944
LANE_OF_FEW = 80  # of few rows
WASTE = 256  # channels: what they cost is what the ends of one tile more cost


@triton.jit
def load_part(x_ptr, first, width, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Channels first … first + width of a row as float32, zeros behind them; FULL: width is BLOCK."""
    at = tl.arange(0, BLOCK)
    if FULL:
        x = tl.load(x_ptr + first + at)
    else:
        x = tl.load(x_ptr + first + at, mask=at < width, other=0.0)
    return x.to(tl.float32)


@triton.jit
def ends(x, width, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """The smallest and the largest of the first ``width`` entries."""
    low, high = x, x
    if not FULL:
        inside = tl.arange(0, BLOCK) < width
        low, high = tl.where(inside, x, float("inf")), tl.where(inside, x, float("-inf"))
    return tl.min(low), tl.max(high)


@triton.jit
def store_codes(q_ptr, x, first, width, low, s, BITS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Round((x - low) / s) - 2^(b-1) as int8."""
    u = divide_tile(x - low, tl.where(s > 0.0, s, 1.0))
    # 0 <= u, and the largest u is 2^b - 1 but for a rounding, so that nothing is to be clamped
    code = byte_of(u, -(2.0 ** (BITS - 1)))
    at = tl.arange(0, BLOCK)
    if FULL:
        tl.store(q_ptr + first + at, code)
    else:
        tl.store(q_ptr + first + at, code, mask=at < width)


@triton.jit
def quantize_per_token_kernel(
    x_ptr, q_ptr, scale_ptr, offset_ptr, D, LOW, stride_x, stride_q,
    PARTS: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    H: tl.constexpr, FULL: tl.constexpr, EARLY: tl.constexpr,
):
    """One row: tiles of A, B and C low channels (B and C may be 0), of H high ones; FULL: there are H high ones."""
    if EARLY:
        await_inputs()
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    x_ptr += wide * stride_x
    q_ptr += wide * stride_q
    a = load_part(x_ptr, 0, LOW, A, True)
    b, c, h = a, a, a
    if B:
        b = load_part(x_ptr, A, LOW - A, B, C > 0)
    if C:
        c = load_part(x_ptr, A + B, LOW - A - B, C, False)
    if PARTS == 2:
        h = load_part(x_ptr, LOW, D - LOW, H, FULL)
    low, high = ends(a, LOW, A, True)  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
    if B:
        more = ends(b, LOW - A, B, C > 0)
        low, high = tl.minimum(low, more[0]), tl.maximum(high, more[1])
    if C:
        more = ends(c, LOW - A - B, C, False)
        low, high = tl.minimum(low, more[0]), tl.maximum(high, more[1])
    s = tl.div_rn(high - low, 2.0**LOW_BITS - 1.0)
    store_codes(q_ptr, a, 0, LOW, low, s, LOW_BITS, A, True)
    if B:
        store_codes(q_ptr, b, A, LOW - A, low, s, LOW_BITS, B, C > 0)
    if C:
        store_codes(q_ptr, c, A + B, LOW - A - B, low, s, LOW_BITS, C, False)
    tl.store(scale_ptr + row * PARTS, s)
    tl.store(offset_ptr + row * PARTS, low + s * 2.0 ** (LOW_BITS - 1))
    if PARTS == 2:
        low, high = ends(h, D - LOW, H, FULL)  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
        s = tl.maximum(tl.div_rn(high - low, 2.0**HIGH_BITS - 1.0), s * 2.0 ** (LOW_BITS - HIGH_BITS - 1))
        store_codes(q_ptr, h, LOW, D - LOW, low, s, HIGH_BITS, H, FULL)
        tl.store(scale_ptr + row * PARTS + 1, s)
        tl.store(offset_ptr + row * PARTS + 1, low + s * 2.0 ** (HIGH_BITS - 1))


def tiles_of(width: int) -> tuple[int, int, int]:
    """(A, B, C): powers of two that hold a part, if possible with less than WASTE channels over; B and C may be 0."""
    sizes, rest = [1 << (width.bit_length() - 1)], width
    for last in (False, True):
        rest -= sizes[-1]
        over = 1 << (rest - 1).bit_length() if rest > 0 else 0
        sizes.append(over if last or over - rest < WASTE else over // 2)
    a, b, c = sizes
    return a, b, c


def why_not(x: Tensor, widths: Sequence[int], bits: Sequence[int]) -> str | None:
    """None, or why these operands cannot be quantized here."""
    if reason := why_not_rows(x):
        return reason
    checks = (
        (len(widths) in (1, 2) and len(bits) == len(widths) and sum(widths) == x.shape[1], f"one or two parts, not {list(widths)}"),
        (all(2 <= b <= 8 for b in bits), f"bits = {list(bits)}: 2 to 8"),
    )
    return first_reason(checks) or why_not_here(x)


def plan(x: Tensor, widths: Sequence[int], bits: Sequence[int], new: New | None = None) -> Plan[Rows] | Refusal:
    """One launch, of a program a row."""
    if reason := why_not(x, widths, bits):
        return Refusal(reason)
    (m, width), two = x.shape, len(widths) == 2
    out = Rows.new(new or rows_like(x), width, len(widths))
    a, b, c = tiles_of(widths[0])
    h = power_of_two(widths[-1]) if two else 1
    args = dict(
        x_ptr=x, q_ptr=out.q, scale_ptr=out.scale, offset_ptr=out.offset, D=width, LOW=widths[0], stride_x=x.stride(0),
        stride_q=out.q.stride(0),
    )
    early = starts_early(x.device, m)
    constants = dict(
        PARTS=len(widths), LOW_BITS=bits[0], HIGH_BITS=bits[-1], A=a, B=b, C=c, H=h, FULL=h == widths[-1], EARLY=early,
    )
    warps = warps_of_row(m, a + b + c + (h if two else 0), LANE, LANE_OF_FEW)
    written = ("q_ptr", "scale_ptr", "offset_ptr")
    launch = Launch(quantize_per_token_kernel, (m,), args, constants, written, warps, 1, block_rows=1, early=early)
    return Plan((launch,), out)
