"""A linear whose weight alone is quantized (ops/weight_only_matmul.py), from the same stored weight for every M.

    y = x Wᵀ + b        W[n, k] = (w_q[n, k] - z[n, k // g]) s[n, k // g]       z = 0 in the symmetric case

Shapes:  x [M, K] fp16 | bf16 | fp32 (interpreter)   w_q int8 [N, K] or uint8 (ops/pack.py: 2, 3, 4 bits)
         s float [N] (g = 0) or [N, ceil(K/g)]   z int8 or float16 like s: in code units   b [N]   y [M, N] in x's dtype
M:       few rows: skinny tiles, K split over programs;  to some hundred: the same kernel, larger tiles, the weight unpacked
         in registers, or byte_matmul.py;  above: the weight is written out once in x's dtype and multiplied by torch.
Exact:   where a step of K lies in one group, the scale multiplies a float32 sum of exact codes: closer to the formula than
         the op, which rounds the weight to x's dtype first.  Codes less a zero point between them are rounded to x's dtype.
Arch:    Ampere and newer.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from mmqc.kernels.matmul import configs
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.linears import Linear, three
from mmqc.kernels.matmul.product import ANY_ROWS, EAGER, ONE_LAUNCH_ROWS, Caller, Product, each_alone, share_a_launch
from mmqc.kernels.matmul.scaled_matmul import OUTPUTS
from mmqc.kernels.matmul.unpack_weight import unpack_weight
from mmqc.kernels.matmul.weight_only_matmul_tiles import weight_only_matmul_kernel
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx, why_not_here
from mmqc.kernels.shared.early_start import early_lines
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.split_k import Workspace, workspace
from mmqc.kernels.warpgroup import byte_matmul
from mmqc.ops.pack import STRETCHES, packed_width, stretch
from mmqc.ops.weight_only_matmul import ZEROS

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
LARGE = 1 << 25  # entries of a weight that keeps the machine busy
CROSSING_STAGES = 2  # where a step crosses groups: 4-byte scales then pass through shared memory, a tile for each stretch


def supports(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, group_size: int, zero: Tensor | None, bits: int
) -> str | None:
    """None, or why these operands cannot be multiplied here."""
    if x.dim() != 2 or w_q.dim() != 2:
        return f"x and w_q are matrices, not {list(x.shape)} and {list(w_q.shape)}"
    k, (n, stored) = x.shape[1], w_q.shape
    scales = (n, -(-k // group_size)) if group_size else (n,)
    checks = (
        (x.dtype in DTYPES, f"x is one of {list(DTYPES)}, not {x.dtype}"),
        (bits in STRETCHES, f"bits = {bits}: one of {sorted(STRETCHES)}"),
        (w_q.dtype == (torch.int8 if bits == 8 else torch.uint8), f"{bits} bits are not stored as {w_q.dtype}"),
        (k > 0 and bits in STRETCHES and stored == packed_width(k, bits), f"w_q has {stored} columns for inputs of width {k}"),
        (group_size >= 0, f"group_size = {group_size}"),
        (w_scale.shape == scales, f"w_scale for group_size {group_size} is {list(scales)}, not {list(w_scale.shape)}"),
        (w_scale.is_contiguous() and w_scale.is_floating_point(), f"w_scale is contiguous and float, not {w_scale.dtype}"),
        (zero is None or (zero.shape == scales and zero.dtype in ZEROS and zero.is_contiguous()),
         f"zero is contiguous int8 or float16 {list(scales)}"),
        (bias is None or bias.shape == (n,), f"bias is [{n}]"),
        ((x.stride(1) == 1 and w_q.stride(1) == 1) or k == 1, "rows of x and w_q are contiguous"),
        (w_scale.numel() < 2**31, "scales are addressed with 32 bits"),
    )
    return next((why for ok, why in checks if not ok), None) or why_not_here(x, w_q, w_scale, bias, zero)


def weight_only_matmul(
    x: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None = None, *, group_size: int = 0,
    zero: Tensor | None = None, out: Tensor | None = None, config: MatmulConfig | None = None, bits: int | None = None,
) -> Tensor:
    """Multiply; ``bits`` follow from w_q's dtype, 4 or 8, unless they are given."""
    bits = stored_as(w_q) if bits is None else bits
    reason = supports(x, w_q, w_scale, bias, group_size, zero, bits)
    if reason is not None:
        raise ValueError(f"weight_only_matmul: {reason}")
    m, n = x.shape[0], w_q.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device) if out is None else out
    if y.shape != (m, n) or y.dtype != x.dtype or (n > 1 and y.stride(1) != 1):
        raise ValueError(
            f"weight_only_matmul: out is {x.dtype} [{m}, {n}], rows contiguous; got {y.dtype} {list(y.shape)}"
        )
    multiply(x, [Linear(w_q, w_scale, bias, y)], group_size, bits, zero, config=config)
    return y


def stored_as(w_q: Tensor) -> int:
    """Bits of a code, where there is no 2 or 3."""
    return 4 if w_q.dtype == torch.uint8 else 8


def multiply(
    x: Tensor, linears: Sequence[Linear], group_size: int, bits: int, zero: Tensor | None = None, *,
    config: MatmulConfig | None = None,
) -> None:
    """Fill every linear's y, without a check."""
    for product in plan(x, linears, bits, config=config, zero=zero, group_size=group_size):
        some = [linears[i] for i in product.linears]
        if product.written_out:
            _multiply_written_out(x, some[0], zero, group_size, bits)
        else:
            launch_of(product, x, some, zero, group_size, bits).run()


def plan(
    x: Tensor, linears: Sequence[Linear], bits: int, caller: Caller = EAGER, *, config: MatmulConfig | None = None,
    zero: Tensor | None = None, group_size: int = 0,
) -> list[Product]:
    """The products: several linears of few rows share one, else each has its own.

    In a graph each of those has the tile for all their columns, not for its own; neither was timed against the other.
    """
    (m, k), op, width = x.shape, f"weight_int{bits}", sum(linear.w.shape[0] for linear in linears)
    if not m or not width:
        return []
    if config is None and caller.gluon and stay_bytes(x, linears, zero, group_size):
        tiles = [configs.config(byte_matmul.OP, m, linear.w.shape[0], k, x.device) for linear in linears]
        return [Product("registers", tile, (i,)) for i, tile in enumerate(tiles)]
    c = config or configs.config(op, m, width, k, x.device)
    if c.variant == "unpack" and not caller.always:
        c = configs.config(op, configs.WRITTEN_OUT_ABOVE, width, k, x.device)
        c = ANY_ROWS if c.variant == "unpack" or c.split_k > 1 else c
    if len(linears) > 1 and not share_a_launch(m, c, linears):
        given = c if caller.graph and c.variant != "unpack" else config
        return each_alone(lambda linear: plan(x, [linear], bits, caller, config=given), linears)
    kernel = "torch" if c.variant == "unpack" else "pointers"
    return [Product(kernel, c, tuple(range(len(linears))), c.variant == "unpack")]


def stay_bytes(x: Tensor, linears: Sequence[Linear], zero: Tensor | None, group_size: int) -> bool:
    """Whether byte_matmul.py takes x and each of these weights, and is faster: of few rows several share a launch of pointers."""
    m, k = x.shape
    if not byte_matmul.FEW < m <= byte_matmul.SOME or (len(linears) > 1 and m <= ONE_LAUNCH_ROWS["columns"]):
        return False
    large = all(linear.w.shape[0] * k >= LARGE for linear in linears)
    return large and all(byte_matmul.why_not(x, linear, zero, group_size) is None for linear in linears)


def launch_of(
    product: Product, x: Tensor, linears: Sequence[Linear], zero: Tensor | None, group_size: int, bits: int,
    work: Workspace = workspace,
) -> Launch:
    """The launch of a product that is not written out."""
    if product.is_gluon:
        return byte_matmul.launch(x, linears[0], product.tile, work)
    return launch(x, linears, zero, group_size, bits, product.tile, work)


def _multiply_written_out(x: Tensor, linear: Linear, zero: Tensor | None, group_size: int, bits: int) -> None:
    w = unpack_weight(linear.w.contiguous(), x.shape[1], bits=bits, dtype=x.dtype, scale=linear.scale, zero=zero,
                      group_size=group_size)
    if linear.bias is None:
        torch.mm(x, w.t(), out=linear.y)
    else:
        torch.addmm(linear.bias.to(x.dtype), x, w.t(), out=linear.y)


def one_group_a_step(k: int, bits: int, group_size: int, block_k: int) -> bool:
    """Whether every step of K, in every stretch of a packed row, lies in one group."""
    return group_size > 0 and group_size % block_k == 0 and whole_steps(k, bits, block_k)


def whole_steps(k: int, bits: int, block_k: int) -> bool:
    """Whether the steps of ``block_k`` columns end with every stretch, and no stretch beyond K."""
    length, count = stretch(k, bits), STRETCHES[bits]
    return length % block_k == 0 and length * count == k and not (bits == 3 and length // 2 % block_k)


def step(k: int, bits: int, group: int, scale: Tensor, c: MatmulConfig, staged: int = 64) -> tuple[int, bool, int]:
    """The columns of a step, whether all lie in one group, and how many steps are under way.

    A step does not leave its group, if that can be had with a tile that tensor cores take.  Where it does, ``staged`` is the
    most columns whose 4-byte scales find room in shared memory.
    """
    block_k = c.block_k
    while block_k > 32 and group and not one_group_a_step(k, bits, group, block_k):
        block_k //= 2
    if not group or one_group_a_step(k, bits, group, block_k):
        return block_k, group > 0, c.num_stages
    if scale.element_size() < 4:
        return min(c.block_k, 64), False, c.num_stages
    return min(c.block_k, staged), False, min(c.num_stages, CROSSING_STAGES)


def launch(
    x: Tensor, linears: Sequence[Linear], zero: Tensor | None, group: int, bits: int, c: MatmulConfig,
    work: Workspace = workspace,
) -> Launch:
    """One launch for all linears."""
    (m, k), w, scale = x.shape, linears[0].w, linears[0].scale
    stored = stretch(k, bits)
    block_k, aligned, stages = step(k, bits, group, scale, c)
    (w0, w1, w2), (s0, s1, s2), biases, (y0, y1, y2), _ = zip(*three(linears), strict=True)
    b0, b1, b2 = (y if b is None else b for y, b in zip((y0, y1, y2), biases, strict=True))
    tiles = ceil_div(m, c.block_m) * sum(ceil_div(linear.w.shape[0], c.block_n) for linear in linears)
    parts, counters = work(x.device, tiles, c.block_m * c.block_n, c.split_k, torch.float32)
    args = dict(
        x_ptr=x, w_ptr=w0, w1_ptr=w1, w2_ptr=w2, y_ptr=y0, y1_ptr=y1, y2_ptr=y2, scale_ptr=s0, scale1_ptr=s1,
        scale2_ptr=s2, zero_ptr=scale if zero is None else zero, bias_ptr=b0, bias1_ptr=b1, bias2_ptr=b2,
        part_ptr=parts, counter_ptr=counters, M=m, N=w0.shape[0], N1=w1.shape[0], N2=w2.shape[0], K=k, STORED=stored,
        GROUPS=scale.shape[1] if group else 1, stride_x=x.stride(0), stride_w=w.stride(0), stride_y=y0.stride(0),
        stride_y1=y1.stride(0), stride_y2=y2.stride(0),
    )
    lines = early_lines(x.device, c.block_m)
    constants = dict(
        LINEARS=len(linears), GROUP=group, ALIGNED=aligned, HAS_ZERO=zero is not None, HAS_BIAS=biases[0] is not None,
        BITS=bits, EVEN_K=whole_steps(k, bits, block_k), PTX=has_inline_ptx(x.device), DTYPE=DTYPES[x.dtype],
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=block_k, GROUP_M=c.group_m, SPLIT=c.split_k > 1, LINES=lines,
    )
    return Launch(weight_only_matmul_kernel, (tiles, c.split_k), args, constants, OUTPUTS, c.num_warps, stages,
                  c.block_m, early=lines > 0)
