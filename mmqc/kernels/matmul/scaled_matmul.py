"""The quantized linear (ops/scaled_matmul.py): int8 x int8 or int8 x packed int4 in int32, fp8 x fp8 in float32.

    y = (x_q w_qᵀ) s_x(m) s_w[n] + b[n] + r[m, n]        scaled_matmuls: several of one x_q

Shapes:  x_q [M, K] int8 | fp8e4nv   w_q [N, K] of the same type, or uint8 [N, ceil(K/2)] (ops/pack.py; with fp8 activations
         the codes are exact fp8 numbers)   s_x: row_scale.py   s_w float32 [N]   b [N]   r, y [M, N]
         rows of x_q and w_q are contiguous; out_dtype fp16 | bf16 | fp32
Exact:   int8 sums are exact for K <= 131,072 (packed: K < 131,072); the epilogue is float32, rounded once.
Arch:    Ampere and newer; fp8 from compute capability 8.9; TMA from 9.0, elsewhere (and for K that is no multiple of 16,
         which TMA cannot address) the pointer kernel, with at most three stages.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from mmqc.kernels.matmul import packed_matmul as in_registers
from mmqc.kernels.matmul import pingpong_matmul as pingpong
from mmqc.kernels.matmul.configs import PERSISTENT, MatmulConfig
from mmqc.kernels.matmul.configs import config as choose
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.scaled_matmul_tiles import scaled_matmul_descriptor_kernel, scaled_matmul_kernel
from mmqc.kernels.matmul.unpack_weight import unpack_weight
from mmqc.kernels.shared.device_facts import (
    WARPGROUP_ROWS,
    ceil_div,
    fp8_reason,
    has_inline_ptx,
    has_tensor_descriptors,
    multiprocessors,
    why_not_here,
)
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import RowScale, row_scale
from mmqc.kernels.shared.split_k import Workspace, workspace

FP8 = torch.float8_e4m3fn
MAX_K = 131_071
FEW_ROWS = 64  # up to which several linears share a launch: beyond, each fills the machine
OUTPUTS = ("y_ptr", "y1_ptr", "y2_ptr", "part_ptr", "counter_ptr")
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PLAIN = Epilogue()
BY_GLUON = {"pingpong": pingpong.launch, "registers": in_registers.launch}  # of one linear, by the tile's variant


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


def op_name(x_q: Tensor, w_q: Tensor) -> str:
    """The op's name in configs.py."""
    return op_of(x_q.dtype, w_q.dtype)


def op_of(x: torch.dtype, w: torch.dtype) -> str:
    """The same by the types of the codes."""
    kind = "fp8" if x == FP8 else "int8"
    return f"scaled_{kind}" if w != torch.uint8 else "scaled_int4" if kind == "int8" else "scaled_int4_fp8"


def scaled_matmul(
    x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None = None, *,
    visual: Tensor | None = None, split: Tensor | None = None, residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None, config: MatmulConfig | None = None,
    fast_accumulation: bool = True,
) -> Tensor:
    """Multiply; ``fast_accumulation`` keeps fp8 sums in the tensor core (as ``torch._scaled_mm(use_fast_accum=True)``)."""
    reason = supports(x_q, w_q, w_scale, bias, out_dtype)
    if reason is not None:
        raise ValueError(f"scaled_matmul: {reason}")
    m, n = x_q.shape[0], w_q.shape[0]
    rows = row_scale(x_scale, m, visual, split)
    y = torch.empty(m, n, dtype=out_dtype, device=x_q.device) if out is None else out
    if y.shape != (m, n) or y.dtype != out_dtype or (n > 1 and y.stride(1) != 1):
        raise ValueError(
            f"scaled_matmul: out is {out_dtype} [{m}, {n}], rows contiguous; got {y.dtype} {list(y.shape)}"
        )
    if residual is not None and (residual.shape != (m, n) or (n > 1 and residual.stride(1) != 1)):
        raise ValueError(f"scaled_matmul: residual is [{m}, {n}], rows contiguous; got {list(residual.shape)}")
    multiply(x_q, [Linear(w_q, w_scale, bias, y)], rows, residual, config=config, fast_accumulation=fast_accumulation)
    return y


def multiply(
    x_q: Tensor, linears: list[Linear], rows: RowScale, residual: Tensor | None = None, *,
    config: MatmulConfig | None = None, fast_accumulation: bool = True,
) -> None:
    """Fill every linear's y, without a check: several linears of few rows in one launch, else one after the other."""
    m, k = x_q.shape
    width = sum(linear.w.shape[0] for linear in linears)
    if not m or not width:
        return
    c = config or tile(x_q, linears[0], width, fast_accumulation)
    if len(linears) > 1 and not (m <= FEW_ROWS and c.variant in ("rows", "columns") and alike(linears)):
        for linear in linears:
            multiply(x_q, [linear], rows, config=config, fast_accumulation=fast_accumulation)
        return
    if c.variant == "unpack":
        linears = [linear._replace(w=unpack_weight(linear.w, k, bits=4, dtype=x_q.dtype)) for linear in linears]
        c = tile(x_q, linears[0], width, fast_accumulation)
    if c.variant in BY_GLUON:
        BY_GLUON[c.variant](x_q, linears[0], rows, residual, c, PLAIN).run()
    elif c.variant in PERSISTENT and descriptor_reason(x_q, linears[0].w) is None:
        descriptor_launch(x_q, linears[0], rows, residual, c, fast_accumulation).run()
    else:
        c = c.with_stages(3) if c.variant in PERSISTENT else c
        pointer_launch(x_q, linears, rows, residual, c, fast_accumulation).run()


def tile(x_q: Tensor, linear: Linear, width: int, fast_accumulation: bool = True) -> MatmulConfig:
    """The tile for so many columns: of all kernels that take the operands."""
    (m, k), op = x_q.shape, op_name(x_q, linear.w)
    may = m > WARPGROUP_ROWS and fast_accumulation
    if may and op in pingpong.OPS and pingpong.why_not(x_q, linear.w, linear.y) is None:
        return choose(pingpong.OPS[op], m, width, k, x_q.device)
    if may and op == "scaled_int4" and in_registers.why_not(x_q, linear.w, linear.y, k) is None:
        c = choose(in_registers.OP, m, width, k, x_q.device)
        if c.variant == "registers":
            return c
    return choose(op, m, width, k, x_q.device)


def scaled_matmuls(
    x_q: Tensor, w_q: list[Tensor], x_scale: Tensor, w_scale: list[Tensor], bias: list[Tensor | None], *,
    visual: Tensor | None = None, split: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    config: MatmulConfig | None = None,
) -> list[Tensor]:
    """Several linears of x_q."""
    for parts in zip(w_q, w_scale, bias, strict=True):
        reason = supports(x_q, *parts, out_dtype)
        if reason is not None:
            raise ValueError(f"scaled_matmuls: {reason}")
    m = x_q.shape[0]
    ys = [torch.empty(m, w.shape[0], dtype=out_dtype, device=x_q.device) for w in w_q]
    linears = [Linear(*parts) for parts in zip(w_q, w_scale, bias, ys, strict=True)]
    multiply(x_q, linears, row_scale(x_scale, m, visual, split), config=config)
    return ys


def alike(linears: list[Linear]) -> bool:
    """Whether one launch can take these linears: two or three of one layout, all with a bias of one dtype or none with one."""
    layouts = {(w.dtype, w.shape[1], w.stride(), s.dtype, s.shape[1:]) for w, s, _, _ in linears}
    biases = {None if b is None else b.dtype for _, _, b, _ in linears}
    return 1 < len(linears) <= 3 and len(layouts) == 1 and len(biases) == 1 and all(y.shape[1] for *_, y in linears)


def descriptor_reason(x_q: Tensor, w_q: Tensor) -> str | None:
    """None, or why TMA cannot address the operands."""
    if not has_tensor_descriptors(x_q.device):
        return "no tensor descriptors before compute capability 9.0"
    if w_q.dtype == torch.uint8:
        return "packed weights are read by pointers"
    if any(t.stride(0) % 16 or t.data_ptr() % 16 for t in (x_q, w_q)):
        return "tensor descriptors need rows and addresses that are multiples of 16 bytes"
    return None


def three(linears: list[Linear]) -> list[Linear]:
    """As many as a kernel has names for; what is not there is not read."""
    return (linears + linears[-1:] * 2)[:3]


def pointer_launch(
    x: Tensor, linears: list[Linear], rows: RowScale, residual: Tensor | None, c: MatmulConfig, fast: bool = True,
    work: Workspace = workspace, epilogue: Epilogue = PLAIN,
) -> Launch:
    """One launch for all linears, operands read by pointers."""
    (m, k), w = x.shape, linears[0].w
    stored = w.shape[1]
    packed, integer = w.dtype == torch.uint8, x.dtype == torch.int8
    (w0, w1, w2), (s0, s1, s2), biases, (y0, y1, y2) = zip(*three(linears), strict=True)
    b0, b1, b2 = (s if b is None else b for s, b in zip((s0, s1, s2), biases, strict=True))
    tiles = ceil_div(m, c.block_m) * sum(ceil_div(linear.w.shape[0], c.block_n) for linear in linears)
    low, rank = epilogue.of_one(s0)
    parts, counters = work(x.device, tiles, c.block_m * c.block_n, c.split_k, torch.int32 if integer else torch.float32)
    args = dict(
        x_ptr=x, w_ptr=w0, w1_ptr=w1, w2_ptr=w2, y_ptr=y0, y1_ptr=y1, y2_ptr=y2, x_scale_ptr=rows.scale, row_ptr=rows.rows,
        w_scale_ptr=s0, w_scale1_ptr=s1, w_scale2_ptr=s2, bias_ptr=b0, bias1_ptr=b1, bias2_ptr=b2,
        residual_ptr=y0 if residual is None else residual, part_ptr=parts, counter_ptr=counters, **epilogue.args(s0), **low,
        M=m, N=w0.shape[0], N1=w1.shape[0], N2=w2.shape[0], K=k, STORED=stored, stride_x=x.stride(0), stride_w=w.stride(0),
        stride_y=y0.stride(0), stride_y1=y1.stride(0), stride_y2=y2.stride(0),
        stride_r=0 if residual is None else residual.stride(0),
    )
    constants = dict(
        LINEARS=len(linears), KIND=rows.kind, HAS_BIAS=biases[0] is not None, HAS_RESIDUAL=residual is not None,
        FACTOR=(1 / 16 if integer else 512.0) if packed else 1.0, PACKED=packed, COLUMNS=c.variant == "columns",
        EVEN_K=stored % c.block_k == 0 and not (packed and k % 2), FAST_ACC=fast, PTX=has_inline_ptx(x.device),
        ACC=tl.int32 if integer else tl.float32, BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k,
        GROUP_M=c.group_m, SPLIT=c.split_k > 1, **epilogue.constants(), **rank,
    )
    return Launch(scaled_matmul_kernel, (tiles, c.split_k), args, constants, OUTPUTS, c.num_warps, c.num_stages,
                  c.block_m)


def descriptor_launch(
    x: Tensor, linear: Linear, rows: RowScale, residual: Tensor | None, c: MatmulConfig, fast: bool = True,
    epilogue: Epilogue = PLAIN,
) -> Launch:
    """One linear in a persistent grid, operands read by TMA."""
    w, w_scale, bias, y = linear
    (m, k), n = x.shape, w.shape[0]
    low, rank = epilogue.of_one(w_scale)
    tiles = ceil_div(m, c.block_m) * ceil_div(n, c.block_n + c.tail)
    programs = min(c.per_sm * multiprocessors(x.device), tiles)
    args = dict(
        x_desc=x, w_desc=w, w_tail_desc=w, y_ptr=y, x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=w_scale,
        bias_ptr=w_scale if bias is None else bias, residual_ptr=y if residual is None else residual,
        M=m, N=n, K=k, stride_y=y.stride(0), stride_r=0 if residual is None else residual.stride(0),
        **epilogue.args(w_scale), **low,
    )
    constants = dict(
        KIND=rows.kind, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, FAST_ACC=fast,
        ACC=tl.int32 if x.dtype == torch.int8 else tl.float32, BLOCK_M=c.block_m, BLOCK_N=c.block_n, TAIL=c.tail,
        BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=programs, FLATTEN=c.variant == "descriptors",
        PTX=has_inline_ptx(x.device), **epilogue.constants(), **rank,
    )
    blocks = {"x_desc": (c.block_m, c.block_k), "w_desc": (c.block_n, c.block_k)}
    blocks |= {"w_tail_desc": (c.tail, c.block_k)} if c.tail else {}
    kernel = scaled_matmul_descriptor_kernel
    return Launch(kernel, (programs,), args, constants, ("y_ptr",), c.num_warps, c.num_stages, 0, blocks)
