"""The quantized linear (ops/scaled_matmul.py): int8 x int8 or int8 x packed int4 in int32, fp8 x fp8 in float32.

    y = (x_q w_qᵀ) s_x(m) s_w[n] + b[n]

Shapes:  x_q [M, K] int8 | fp8e4nv   w_q [N, K] of the same type, or uint8 [N, ceil(K/2)] (ops/pack.py; with fp8 activations
         the codes are exact fp8 numbers)   s_x: row_scale.py   s_w float32 [N]   b [N]   y [M, N]
         rows of x_q and w_q are contiguous; out_dtype fp16 | bf16 | fp32
Exact:   int8 sums are exact for K <= 131,072 (packed: K < 131,072); the epilogue is float32, rounded once.
Arch:    Ampere and newer; fp8 from compute capability 8.9; TMA from 9.0, elsewhere (and for K that is no multiple of 16,
         which TMA cannot address) the pointer kernel, with at most three stages.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
import triton.language as tl
from torch import Tensor

from mmqc.kernels.matmul import configs
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear, three
from mmqc.kernels.matmul.product import (
    ANY_ROWS,
    EAGER,
    Caller,
    New,
    Product,
    each_alone,
    kernel_of,
    new_tensor,
    share_a_launch,
    why_not_tma,
)
from mmqc.kernels.matmul.scaled_matmul_tiles import scaled_matmul_descriptor_kernel, scaled_matmul_kernel
from mmqc.kernels.matmul.unpack_weight import unpack_launch
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS, ceil_div, fp8_reason, has_inline_ptx, multiprocessors, why_not_here
from mmqc.kernels.shared.early_start import early_lines
from mmqc.kernels.shared.launch import Launch, Shape
from mmqc.kernels.shared.row_scale import RowScale, row_scale
from mmqc.kernels.shared.split_k import Workspace, workspace
from mmqc.kernels.warpgroup import packed_matmul, pingpong_matmul

FP8 = torch.float8_e4m3fn
MAX_K = 131_071
OUTPUTS = ("y_ptr", "y1_ptr", "y2_ptr", "part_ptr", "counter_ptr")
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PLAIN = Epilogue()
GLUON = {"pingpong": pingpong_matmul.launch, "registers": packed_matmul.launch}  # by the product's kernel


def supports(x_q: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> str | None:
    """None, or why these operands cannot be multiplied here."""
    if x_q.dim() != 2 or w_q.dim() != 2:
        return f"x_q and w_q are matrices, not {list(x_q.shape)} and {list(w_q.shape)}"
    (_, k), (n, stored) = x_q.shape, w_q.shape
    packed = w_q.dtype == torch.uint8
    checks = (
        (x_q.dtype in (torch.int8, FP8), f"x_q is int8 or float8_e4m3fn, not {x_q.dtype}"),
        (packed or w_q.dtype == x_q.dtype, f"w_q is {x_q.dtype} or packed uint8, not {w_q.dtype}"),
        (stored == ((k + 1) // 2 if packed else k), f"w_q has {stored} columns for inputs of width {k}"),
        (1 <= k <= MAX_K, f"K = {k}: 1 to {MAX_K}"),
        (
            w_scale.shape == (n,) and w_scale.dtype == torch.float32,
            f"w_scale is float32 [{n}], not {list(w_scale.shape)}",
        ),
        (bias is None or bias.shape == (n,), f"bias is [{n}]"),
        (out_dtype in OUT_DTYPES, f"out_dtype is one of {OUT_DTYPES}, not {out_dtype}"),
        ((x_q.stride(1) == 1 and w_q.stride(1) == 1) or k == 1, "rows of x_q and w_q are contiguous"),
    )
    reason = next((why for ok, why in checks if not ok), None) or why_not_here(x_q, w_q, w_scale, bias)
    if reason is None and x_q.dtype == FP8:
        reason = fp8_reason(x_q.device)
        if reason is None and packed and not has_inline_ptx(x_q.device):
            reason = "packed weights become fp8 numbers by PTX only"
    return reason


def op_name(x: torch.dtype, w: torch.dtype) -> str:
    """The op's name in configs.py, by the types of the codes."""
    kind = "fp8" if x == FP8 else "int8"
    return f"scaled_{kind}" if w != torch.uint8 else "scaled_int4" if kind == "int8" else "scaled_int4_fp8"


def scaled_matmul(
    x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None = None, *,
    visual: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None,
    config: MatmulConfig | None = None,
) -> Tensor:
    """Multiply, by a given tile or the tuned one."""
    reason = supports(x_q, w_q, w_scale, bias, out_dtype)
    if reason is not None:
        raise ValueError(f"scaled_matmul: {reason}")
    m, n = x_q.shape[0], w_q.shape[0]
    rows = row_scale(x_scale, m, visual)
    y = torch.empty(m, n, dtype=out_dtype, device=x_q.device) if out is None else out
    if y.shape != (m, n) or y.dtype != out_dtype or (n > 1 and y.stride(1) != 1):
        raise ValueError(
            f"scaled_matmul: out is {out_dtype} [{m}, {n}], rows contiguous; got {y.dtype} {list(y.shape)}"
        )
    multiply(x_q, [Linear(w_q, w_scale, bias, y)], rows, config=config)
    return y


def multiply(x_q: Tensor, linears: Sequence[Linear], rows: RowScale, *, config: MatmulConfig | None = None) -> None:
    """Fill every linear's y, without a check."""
    for launch in launches(x_q, linears, rows, plan(x_q, linears, config=config)):
        launch.run()


def plan(
    x: Tensor, linears: Sequence[Linear], caller: Caller = EAGER, *, config: MatmulConfig | None = None
) -> list[Product]:
    """The products: several linears of few rows share one, else each has its own; ``config`` in place of the tuned tile."""
    width = sum(linear.w.shape[0] for linear in linears)
    if not x.shape[0] or not width:
        return []
    c = config or tile_of(x, linears[0], width, caller)
    if c.variant == "registers" and config is None and not stays_packed(x, linears[1:]):
        return each_alone(lambda linear: plan(x, [linear], caller), linears)
    if len(linears) > 1 and not share_a_launch(x.shape[0], c, linears):
        return each_alone(lambda linear: plan(x, [linear], caller, config=config), linears)
    everyone, (first, *_), written_out = tuple(range(len(linears))), linears, c.variant == "unpack" and caller.always
    if written_out:
        first = as_codes(x, first)
        c = tile_of(x, first, width, caller)
    kernel, c = kernel_of(ANY_ROWS if c.variant == "unpack" else c, why_not_tma(x, first.w) is None)
    return [Product(kernel, c, everyone, written_out)]


def tile_of(x: Tensor, linear: Linear, width: int, caller: Caller = EAGER) -> MatmulConfig:
    """The tile for so many columns: of all kernels that take the operands and that the caller can launch."""
    (m, k), op = x.shape, op_name(x.dtype, linear.w.dtype)
    if m > WARPGROUP_ROWS and caller.gluon and op in pingpong_matmul.OPS and pingpong_matmul.why_not(x, linear.w, linear.y) is None:
        return configs.config(pingpong_matmul.OPS[op], m, width, k, x.device)
    if m > packed_matmul.FEW and caller.gluon and stays_packed(x, [linear]):
        c = configs.config(packed_matmul.OP, m, width, k, x.device)
        if c.variant == "registers":
            return c
    return configs.config(op, m, width, k, x.device)


def stays_packed(x: Tensor, linears: Sequence[Linear]) -> bool:
    """Whether packed_matmul.py takes x and each of these weights."""
    return all(packed_matmul.why_not(x, linear.w, linear.y, x.shape[1]) is None for linear in linears)


def as_codes(x: Tensor, linear: Linear) -> Linear:
    """With a weight of x's type in place of the packed one, as far as its launches depend on it."""
    return linear._replace(w=Shape((linear.w.shape[0], x.shape[1]), x.dtype, x.device))


def launches(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, products: Sequence[Product], *, new: New = new_tensor,
    work: Workspace = workspace,
) -> Iterator[Launch]:
    """Fill every linear's y."""
    for product in products:
        some = [linears[i] for i in product.linears]
        if product.written_out:
            some = yield from writing_out(x, some, new)
        yield launch(x, some, rows, product, PLAIN, work)


def writing_out(
    x: Tensor, linears: Sequence[Linear], new: New, group_size: int = 0
) -> Generator[Launch, None, list[Linear]]:
    """Write packed weights out as codes of x's type, with ``group_size`` times their integer scales; the linears with them."""
    found = []
    for linear in linears:
        w = new((linear.w.shape[0], x.shape[1]), x.dtype, x.device)
        yield unpack_launch(linear.w, w, 4, linear.group_scale if group_size else None, None, group_size)
        found.append(linear._replace(w=w))
    return found


def launch(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, product: Product, epilogue: Epilogue, work: Workspace
) -> Launch:
    """The launch of a product, of linears whose weights are written out where it says so."""
    if product.is_gluon:
        return GLUON[product.kernel](x, linears, rows, product.tile, epilogue, work)
    if product.kernel == "descriptors":
        return descriptor_launch(x, linears[0], rows, product.tile, epilogue)
    return pointer_launch(x, linears, rows, product.tile, epilogue, work)


def pointer_launch(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue, work: Workspace
) -> Launch:
    """One launch for all linears, operands read by pointers."""
    (m, k), w = x.shape, linears[0].w
    stored = w.shape[1]
    packed, integer = w.dtype == torch.uint8, x.dtype == torch.int8
    (w0, w1, w2), (s0, s1, s2), biases, (y0, y1, y2), _ = zip(*three(linears), strict=True)
    b0, b1, b2 = (s if b is None else b for s, b in zip((s0, s1, s2), biases, strict=True))
    tiles = ceil_div(m, c.block_m) * sum(ceil_div(linear.w.shape[0], c.block_n) for linear in linears)
    low, rank = epilogue.of_one(s0)
    parts, counters = work(x.device, tiles, c.block_m * c.block_n, c.split_k, torch.int32 if integer else torch.float32)
    args = dict(
        x_ptr=x, w_ptr=w0, w1_ptr=w1, w2_ptr=w2, y_ptr=y0, y1_ptr=y1, y2_ptr=y2, x_scale_ptr=rows.scale, row_ptr=rows.rows,
        w_scale_ptr=s0, w_scale1_ptr=s1, w_scale2_ptr=s2, bias_ptr=b0, bias1_ptr=b1, bias2_ptr=b2,
        part_ptr=parts, counter_ptr=counters, **epilogue.args(s0), **low,
        M=m, N=w0.shape[0], N1=w1.shape[0], N2=w2.shape[0], K=k, STORED=stored, stride_x=x.stride(0), stride_w=w.stride(0),
        stride_y=y0.stride(0), stride_y1=y1.stride(0), stride_y2=y2.stride(0),
    )
    lines = early_lines(x.device, c.block_m)
    constants = dict(
        LINEARS=len(linears), KIND=rows.kind, HAS_BIAS=biases[0] is not None,
        FACTOR=(1 / 16 if integer else 512.0) if packed else 1.0, PACKED=packed, COLUMNS=c.variant == "columns",
        EVEN_K=stored % c.block_k == 0 and not (packed and k % 2), PTX=has_inline_ptx(x.device),
        ACC=tl.int32 if integer else tl.float32, BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k,
        GROUP_M=c.group_m, SPLIT=c.split_k > 1, **epilogue.constants(), **rank, LINES=lines,
    )
    return Launch(scaled_matmul_kernel, (tiles, c.split_k), args, constants, OUTPUTS, c.num_warps, c.num_stages,
                  c.block_m, early=lines > 0)


def descriptor_launch(
    x: Tensor, linear: Linear, rows: RowScale, c: MatmulConfig, epilogue: Epilogue
) -> Launch:
    """One linear in a persistent grid, operands read by TMA."""
    w, w_scale, bias, y, _ = linear
    (m, k), n = x.shape, w.shape[0]
    low, rank = epilogue.of_one(w_scale)
    programs = c.per_sm * multiprocessors(x.device)  # of few tiles some have none: the kernel is one for any number of rows
    args = dict(
        x_desc=x, w_desc=w, w_tail_desc=w, y_ptr=y, x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=w_scale,
        bias_ptr=w_scale if bias is None else bias, M=m, N=n, K=k, stride_y=y.stride(0), **epilogue.args(w_scale), **low,
    )
    constants = dict(
        KIND=rows.kind, HAS_BIAS=bias is not None,
        ACC=tl.int32 if x.dtype == torch.int8 else tl.float32, BLOCK_M=c.block_m, BLOCK_N=c.block_n, TAIL=c.tail,
        BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=programs, FLATTEN=c.variant == "descriptors",
        PTX=has_inline_ptx(x.device), **epilogue.constants(), **rank,
    )
    blocks = {"x_desc": (c.block_m, c.block_k), "w_desc": (c.block_n, c.block_k)}
    blocks |= {"w_tail_desc": (c.tail, c.block_k)} if c.tail else {}
    kernel = scaled_matmul_descriptor_kernel
    return Launch(kernel, (programs,), args, constants, ("y_ptr",), c.num_warps, c.num_stages, 0, blocks)
