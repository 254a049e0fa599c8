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

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmqc.kernels.matmul import configs, scaled_matmul
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.mixed_matmul_tiles import joined_matmul_kernel, mixed_matmul_kernel
from mmqc.kernels.matmul.product import EAGER, Caller, New, Product, new_tensor, why_not_aligned
from mmqc.kernels.matmul.unpack_weight import join_launch, unpack_launch
from mmqc.kernels.shared.device_facts import (
    WARPGROUP_ROWS,
    capability,
    ceil_div,
    has_tensor_descriptors,
    multiprocessors,
    why_not_here,
)
from mmqc.kernels.shared.launch import Launch, Shape
from mmqc.kernels.shared.row_scale import Rows, RowScale, row_scale
from mmqc.kernels.shared.split_k import Workspace, workspace
from mmqc.kernels.warpgroup import packed_matmul
from mmqc.kernels.warpgroup import pingpong_matmul as pingpong

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
        whole, launches = self.unpacking(width, new_tensor)
        for launch in launches:
            launch.run()
        return whole

    def unpacking(self, width: int, new: New) -> tuple[Weight, list[Launch]]:
        """The weight written out, and the launches that write it."""
        if self.low.dtype == torch.int8:
            return self, []
        n, device = self.low.shape[0], self.low.device
        if self.high is None:
            codes = new((n, width), torch.int8, device)
            return self._replace(low=codes), [unpack_launch(self.low, codes, 4)]
        both = new((n, second_at(width) + self.high.shape[1]), torch.int8, device)
        columns = new((4, n), torch.float32, device)
        joining = join_launch(self.low, self.high, self.scale, self.sum, both, columns, width)
        return self._replace(low=both, high=None, joined=width, columns=columns), [joining]


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
        (all(t.stride(1) == 1 for t in matrices) and why_not_aligned(*matrices) is None,
         "tensor descriptors need rows and addresses that are multiples of 16 bytes"),
    )
    return next((why for ok, why in checks if not ok), None) or why_not_here(*x, w.low, w.high, w.scale, w.sum, bias)


@functools.lru_cache(maxsize=1024)
def config(m: int, n: int, k: int, device: torch.device) -> MatmulConfig:
    """The tuned tile of this GPU for this shape, else a rule of thumb."""
    known = configs.measured(device).get(configs.key(OP, m, n, k))
    if known is not None:
        return known
    if not capability(device):  # the interpreter
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
    reason = why_not(x, w, bias, y, config=config)
    if reason is not None:
        raise ValueError(f"mixed_matmul: {reason}")
    for product in plan(x, w, y, config=config):
        for launch in launches(x, w, bias, y, product):
            launch.run()
    return y


def why_not(
    x: Rows, w: Weight, bias: Tensor | None, y: Tensor, caller: Caller = EAGER, *, config: MatmulConfig | None = None
) -> str | None:
    """None, or why these operands cannot be multiplied here, in the form that their product takes them in."""
    c = config or packed_tile(x, w, y, caller)
    as_it_is = w.joined or (c is not None and c.variant == "registers")
    return supports(x, w if as_it_is else in_shape(x, w), bias, y.dtype)


def plan(x: Rows, w: Weight, y: Tensor, caller: Caller = EAGER, *, config: MatmulConfig | None = None) -> list[Product]:
    """The product, if there is anything to multiply."""
    if not x.q.shape[0] or not w.low.shape[0]:
        return []
    c = config or packed_tile(x, w, y, caller)
    written_out = not w.joined and w.low.dtype == torch.uint8 and (c is None or c.variant != "registers")
    c = c or tile(x, in_shape(x, w) if written_out else w, y, caller)
    kernel = c.variant if c.variant in scaled_matmul.GLUON else "descriptors"
    return [Product(kernel, c, written_out=written_out)]


def in_shape(x: Rows, w: Weight) -> Weight:
    """The weight as it is written out, as far as its product depends on it."""
    return w.unpacking(low_width(x, w), Shape)[0]


def low_width(x: Rows, w: Weight) -> int:
    """Channels of the low part."""
    return x.q.shape[1] - (0 if w.high is None else w.high.shape[1])


def launches(
    x: Rows, w: Weight, bias: Tensor | None, y: Tensor, product: Product, *, new: New = new_tensor,
    work: Workspace = workspace,
) -> Iterator[Launch]:
    """Fill ``y``."""
    c = product.tile
    if product.written_out:
        w, unpacking = w.unpacking(low_width(x, w), new)
        yield from unpacking
    if product.kernel == "registers" and w.high is not None:
        yield packed_matmul.mixed_launch(x, w.low, w.high, w.scale, w.sum, bias, y, c, work)
    elif product.is_gluon and not w.joined:
        linear, rows, epilogue = as_scaled(x, w, bias, y)
        yield scaled_matmul.GLUON[product.kernel](x.q, [linear], rows, c, epilogue, work)
    elif product.is_gluon:
        yield pingpong_launch(x, w, bias, y, c, work)
    else:
        yield descriptor_launch(x, w, bias, y, c)


def packed_tile(x: Rows, w: Weight, y: Tensor, caller: Caller = EAGER) -> MatmulConfig | None:
    """The tile for a packed weight, or None where it is written out."""
    (m, k), high = x.q.shape, 0 if w.high is None else w.high.shape[1]
    if m <= WARPGROUP_ROWS or not caller.gluon or w.low.dtype != torch.uint8 or high % 16:
        return None
    if packed_matmul.why_not(x.q, w.low, y, k - high) is not None:
        return None
    c = configs.config(packed_matmul.MIXED if high else packed_matmul.OP, m, w.low.shape[0], k, x.q.device)
    return c if c.variant == "registers" else None


def tile(x: Rows, w: Weight, y: Tensor, caller: Caller = EAGER) -> MatmulConfig:
    """The tile: of all kernels that take the operands and that the caller can launch."""
    (m, k), n = x.q.shape, w.low.shape[0]
    if m > WARPGROUP_ROWS and caller.gluon and w.high is None and pingpong.why_not(x.q, w.low, y) is None:
        return configs.config(PINGPONG[2 if w.joined else 1], m, n, k, x.q.device)
    return config(m, n, k, x.q.device)


def as_scaled(x: Rows, w: Weight, bias: Tensor | None, y: Tensor) -> tuple[Linear, RowScale, Epilogue]:
    """With one part, scaled_matmul's linear: a scale a row, and a term of rank 1, o_x times s_w c."""
    if w.high is not None or w.joined:
        raise ValueError("mixed_matmul: pingpong_matmul.py has tiles for weights in one part, or in one matrix")
    return (
        Linear(w.low, w.scale, bias, y),
        row_scale(x.scale.view(-1), y.shape[0]),
        Epilogue(low=(x.offset, w.scale * w.sum)),
    )


def pingpong_launch(
    x: Rows, w: Weight, bias: Tensor | None, y: Tensor, c: MatmulConfig, work: Workspace = workspace
) -> Launch:
    """Fill ``y`` from two parts in one matrix by the kernel of pingpong_mixed_tiles.py."""
    from mmqc.kernels.warpgroup.pingpong_mixed_tiles import mixed_pingpong_kernel

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


def descriptor_launch(x: Rows, w: Weight, bias: Tensor | None, y: Tensor, c: MatmulConfig) -> Launch:
    """Fill ``y`` by TMA."""
    (m, k), (n, columns) = x.q.shape, w.low.shape
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
