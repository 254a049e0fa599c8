"""The linear in two precisions (ops/mixed_matmul.py): two scale groups in one walk over one accumulator, all of it in int8.

Shapes:  x: quantize_per_token.py   w low int8 [N, L], or packed uint8 [N, ceil(L/2)], which stays so or is written out first,
         both parts in one matrix   w high int8 [N, K - L]   s_w float32 [N, P]   c int32 [N, P]   b [N]
         y [M, N] fp16 | bf16 | fp32
Hopper:  of many rows by packed_matmul.py, or written out by warp-specialised kernels, two parts in one matrix
         (pingpong_mixed_tiles.py); one part is scaled_matmul's product with a term of rank 1 (``as_scaled``).
Exact:   all sums; with two parts the low one's is rounded once, |e| <= s_xh s_wh / 2 (mixed_matmul_tiles.py).
Needs:   with two parts K < 32,768, and high steps no finer than quantize_per_token.py and solvers/mixed.py make them.
Arch:    Hopper and newer: operands come by TMA, so rows and addresses are multiples of 16 bytes.  Elsewhere the reference.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmqc.kernels.matmul import packed_matmul as in_registers
from mmqc.kernels.matmul import pingpong_matmul as pingpong
from mmqc.kernels.matmul.configs import MatmulConfig, key, measured
from mmqc.kernels.matmul.configs import config as choose
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.mixed_matmul_tiles import joined_matmul_kernel, mixed_matmul_kernel
from mmqc.kernels.matmul.scaled_matmul import BY_GLUON
from mmqc.kernels.matmul.unpack_weight import join_launch, unpack_weight
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS, ceil_div, has_tensor_descriptors, multiprocessors, why_not_here
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import Rows, RowScale, row_scale
from mmqc.kernels.shared.split_k import Workspace, workspace

OP = "mixed_int8"  # in configs.py, for Triton's kernels
PINGPONG = {1: "pingpong_int8", 2: "pingpong_mixed"}  # for all kernels, by parts
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_K = {1: 131_071, 2: 32_767}  # channels by the number of parts: their sums fit int32
STEP = 128  # columns that a second part in the same matrix starts at a multiple of: a step of K, or several
# Triton waits for every int32 product before it goes on, so that two programs of one warpgroup, one of which multiplies while the
# other waits or writes, beat one program of two: scaled_int8 is tuned to the same tile.
TILES = (  # tried by benchmarks/micro/mixed_linear.py --tune; the first is the default for large products
    MatmulConfig(128, 128, 128, 4, 3, variant="descriptors", per_sm=2),
    MatmulConfig(128, 128, 128, 4, 3, group_m=16, variant="descriptors", per_sm=2),
    MatmulConfig(128, 128, 128, 8, 5, variant="descriptors", tail=32),
    MatmulConfig(128, 128, 128, 8, 4, variant="descriptors", tail=64),
    MatmulConfig(64, 128, 128, 4, 3, variant="descriptors", per_sm=2, tail=32),
    MatmulConfig(128, 256, 128, 8, 3, variant="descriptors"),
    MatmulConfig(256, 128, 128, 8, 4, variant="nested"),
    MatmulConfig(64, 128, 128, 4, 4, variant="descriptors", per_sm=2),
)


class Weight(NamedTuple):
    """A weight in one or two parts, and c, the sums of its codes.

    With ``joined``, columns of the first part, ``low`` holds both: the second starts at ``second_at(joined)``, after zeros; and
    ``columns`` [4, N] is what ``join_launch`` makes of the rest.
    """

    low: Tensor
    high: Tensor | None
    scale: Tensor
    sum: Tensor
    joined: int = 0
    columns: Tensor | None = None

    def written_out(self, width: int) -> Weight:
        """With its codes in int8: where the low ones, ``width`` columns, are packed, both parts in one matrix."""
        if self.low.dtype == torch.int8:
            return self
        if self.high is None:
            return self._replace(low=unpack_weight(self.low, width, bits=4))
        n, high = self.high.shape
        both = torch.empty(n, second_at(width) + high, dtype=torch.int8, device=self.low.device)
        columns = torch.empty(4, n, dtype=torch.float32, device=self.low.device)
        join_launch(self.low, self.high, self.scale, self.sum, both, columns, width).run()
        return self._replace(low=both, high=None, joined=width, columns=columns)


def second_at(width: int) -> int:
    """Where the second part starts behind a first one of so many columns."""
    return ceil_div(width, STEP) * STEP


def supports(x: Rows, w: Weight, bias: Tensor | None, out_dtype: torch.dtype) -> str | None:
    """None, or why these operands cannot be multiplied here."""
    (m, k), (n, low), parts = x.q.shape, w.low.shape, 2 if w.joined or w.high is not None else 1
    high, packed = 0 if w.high is None else w.high.shape[1], w.low.dtype == torch.uint8
    if w.joined:
        low, high = w.joined, low - second_at(w.joined)
    elif packed:
        low = k - high if low == ceil_div(k - high, 2) else low
    matrices = [t for t in (x.q, None if packed else w.low, w.high) if t is not None]
    checks = (
        (all(t.dtype == torch.int8 for t in matrices), f"codes are int8, not {[t.dtype for t in matrices]}"),
        (low + high == k, f"w has {low} + {high} columns for {k} channels"),
        (w.high is None or w.high.shape[0] == n, "the parts of w differ in rows"),
        (1 <= k <= MAX_K[parts], f"K = {k} in {parts} parts: 1 to {MAX_K[parts]}"),
        (all(t.shape == (m, parts) and t.is_contiguous() for t in x[1:]), f"x's scale and offset are [{m}, {parts}]"),
        (all(t.shape == (n, parts) and t.is_contiguous() for t in (w.scale, w.sum)), f"w's scale and sum are [{n}, {parts}]"),
        (bias is None or bias.shape == (n,), f"bias is [{n}]"),
        (out_dtype in OUT_DTYPES, f"out_dtype is one of {OUT_DTYPES}, not {out_dtype}"),
        (has_tensor_descriptors(x.q.device), "no tensor descriptors before compute capability 9.0"),
        (all(t.stride(1) == 1 and t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0 for t in matrices),
         "tensor descriptors need rows and addresses that are multiples of 16 bytes"),
    )
    return next((why for ok, why in checks if not ok), None) or why_not_here(*x, w.low, w.high, w.scale, w.sum, bias)


@functools.lru_cache(maxsize=1024)
def config(m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    """The tuned tile of this GPU for this shape, else a rule of thumb."""
    known = measured(device).get(key(OP, m, n, k))
    if known is not None:
        return known
    if device.type != "cuda":  # the interpreter
        return MatmulConfig(32, 32, 32, 4, 1, variant="nested")
    if ceil_div(m, 128) * ceil_div(n, 128) < multiprocessors(device):
        return MatmulConfig(64, 128, 128, 4, 4, variant="descriptors", per_sm=2)
    return TILES[0]


def mixed_matmul(
    x: Rows, w: Weight, bias: Tensor | None = None, *, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None,
    config: MatmulConfig | None = None,
) -> Tensor:
    """Multiply; a packed weight is unpacked on the way, where a tile says so, or written out first."""
    m, n = x.q.shape[0], w.low.shape[0]
    y = torch.empty(m, n, dtype=out_dtype, device=x.q.device) if out is None else out
    if y.shape != (m, n) or y.dtype != out_dtype or (n > 1 and y.stride(1) != 1):
        raise ValueError(f"mixed_matmul: out is {out_dtype} [{m}, {n}], rows contiguous; got {y.dtype} {list(y.shape)}")
    c = config or packed_tile(x, w, y)
    if not w.joined and (c is None or c.variant != "registers"):
        w, c = w.written_out(x.q.shape[1] - (0 if w.high is None else w.high.shape[1])), config
    reason = supports(x, w, bias, out_dtype)
    if reason is not None:
        raise ValueError(f"mixed_matmul: {reason}")
    if m and n:
        c = c or tile(x, w, y)
        if c.variant == "registers" and w.high is not None:
            in_registers.mixed_launch(x, w.low, w.high, w.scale, w.sum, bias, y, c).run()
        elif c.variant in BY_GLUON and not w.joined:
            linear, rows, epilogue = as_scaled(x, w, bias, y)
            BY_GLUON[c.variant](x.q, linear, rows, None, c, epilogue).run()
        elif c.variant == "pingpong":
            pingpong_launch(x, w, bias, y, c).run()
        else:
            launch(x, w, bias, y, c).run()
    return y


def packed_tile(x: Rows, w: Weight, y: Tensor) -> MatmulConfig | None:
    """The tile for a packed weight, or None where it is written out."""
    (m, k), high = x.q.shape, 0 if w.high is None else w.high.shape[1]
    if m <= WARPGROUP_ROWS or w.low.dtype != torch.uint8 or high % 16:
        return None
    if in_registers.why_not(x.q, w.low, y, k - high) is not None:
        return None
    c = choose(in_registers.MIXED if high else in_registers.OP, m, len(w.low), k, x.q.device)
    return c if c.variant == "registers" else None


def tile(x: Rows, w: Weight, y: Tensor) -> MatmulConfig:
    """The tile: of all kernels that take the operands."""
    (m, k), n = x.q.shape, w.low.shape[0]
    if m > WARPGROUP_ROWS and w.high is None and pingpong.why_not(x.q, w.low, y) is None:
        return choose(PINGPONG[2 if w.joined else 1], m, n, k, x.q.device)
    return config(m, n, k, x.q.device)


def as_scaled(x: Rows, w: Weight, bias: Tensor | None, y: Tensor) -> tuple[Linear, RowScale, Epilogue]:
    """With one part, scaled_matmul's linear: a scale a row, and a term of rank 1, o_x times s_w c."""
    if w.high is not None or w.joined:
        raise ValueError("mixed_matmul: pingpong_matmul.py has tiles for weights in one part, or in one matrix")
    return (
        Linear(w.low, w.scale, bias, y),
        row_scale(x.scale.view(-1), len(y)),
        Epilogue(low=(x.offset, w.scale * w.sum)),
    )


def pingpong_launch(
    x: Rows, w: Weight, bias: Tensor | None, y: Tensor, c: MatmulConfig, work: Workspace = workspace
) -> Launch:
    """Fill ``y`` from two parts in one matrix by the kernel of pingpong_mixed_tiles.py."""
    from mmqc.kernels.matmul.pingpong_mixed_tiles import mixed_pingpong_kernel

    if c.num_warps != 4:
        raise ValueError(f"mixed_matmul: two consumers of 4 warps take turns, not {c}")
    m, (n, columns) = x.q.shape[0], w.low.shape
    programs, whole, rest, count = pingpong.grid(c, m, n, ceil_div(columns, c.block_k), x.q.device)
    part, counter = work(x.q.device, rest, c.block_m * c.block_n, count, torch.int32)
    args = dict(
        x_desc=x.q, w_desc=w.low, y_desc=y, x_scale_ptr=x.scale, x_offset_ptr=x.offset, column_ptr=w.columns,
        bias_ptr=w.scale if bias is None else bias, part_ptr=part, counter_ptr=counter, M=m, N=n, LOW=w.joined,
        START=second_at(w.joined), END=columns,
    )
    constants = dict(HAS_BIAS=bias is not None, **pingpong.shape_constants(c, whole, count, y.dtype.itemsize))
    return Launch(
        mixed_pingpong_kernel, (programs,), args, constants, pingpong.OUTPUTS, c.num_warps, 1, 0, pingpong.blocks(c), early=True
    )


def launch(x: Rows, w: Weight, bias: Tensor | None, y: Tensor, c: MatmulConfig | None = None) -> Launch:
    """Fill ``y``."""
    (m, k), (n, columns) = x.q.shape, w.low.shape
    c = c or config(m, n, k, x.q.device)
    tail = c.tail if w.high is None else 0
    programs = min(c.per_sm * multiprocessors(x.q.device), ceil_div(m, c.block_m) * ceil_div(n, c.block_n + tail))
    args = dict(
        x_desc=x.q, w_desc=w.low, y_ptr=y, x_scale_ptr=x.scale, x_offset_ptr=x.offset, w_scale_ptr=w.scale, w_sum_ptr=w.sum,
        bias_ptr=w.scale if bias is None else bias, M=m, N=n, stride_y=y.stride(0),
    )
    constants = dict(
        PARTS=2 if w.joined or w.high is not None else 1, HAS_BIAS=bias is not None, BLOCK_M=c.block_m, BLOCK_N=c.block_n,
        BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=programs,
    )
    of_w = (c.block_n, c.block_k)
    blocks = {"x_desc": (c.block_m, c.block_k), "w_desc": of_w}
    if w.high is not None:  # each in a matrix of its own
        kernel: Any = mixed_matmul_kernel
        args |= dict(w_high_desc=w.high, LOW=columns, HIGH=k - columns)
        blocks |= {"w_high_desc": of_w}
    else:
        kernel, first = joined_matmul_kernel, w.joined or columns
        args |= dict(w_tail_desc=w.low, LOW=first, START=second_at(first) if w.joined else first, END=columns)
        blocks |= {"w_tail_desc": (tail, c.block_k)} if tail else {}
        constants |= dict(TAIL=tail, FLATTEN=c.variant == "descriptors")
    return Launch(kernel, (programs,), args, constants, ("y_ptr",), c.num_warps, c.num_stages, 0, blocks)
