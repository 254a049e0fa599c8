"""The quantized linear with a weight scale per group of K (ops/scaled_matmul.py): int8 x int8, or int8 x packed int4.

    float     y = (sum_j float(C_j) s[n, j]) s_x(m) + b[n]
    integer   y = float(sum_j C_j t[n, j]) s_x(m) s_w[n] + b[n]

Shapes:  x_q int8 [M, K]   w_q int8 [N, K] or uint8 [N, ceil(K/2)] (ops/pack.py)   s_x: row_scale.py   s float32 [N, ceil(K/g)]
         t int32 or int8 [N, ceil(K/g)]   s_w float32 [N]   b [N]   y [M, N] fp16 | bf16 | fp32; rows of x_q and w_q are contiguous
Exact:   C_j in int32 for any g; the integer form's sum as long as it fits int32 (solvers/integer_scale.py proves it).
Cost:    a group adds a pass over the accumulator: BM BN multiply-adds (float: conversions too) on the plain units for BM BN g on
         the tensor cores.  A thread holds at most 64 sums of a group next to its 128 of all groups; larger tiles take their
         columns in two halves.
int8 t:  |w_q t| <= 127, so that many rows are multiplied with w_q t, written out once in int8, in one product over all of K: a
         multiply-add costs as many issue slots as the conversion and multiply-add of the float form (IMAD at half rate against
         I2FP and FFMA, 64 and 128 a cycle), and Triton never overlaps a product in int32 with either: it lets only float32
         accumulators run on.  The pass per group has to go, not to get cheaper.
M:       to 2,048 rows packed codes are unpacked in registers; above the weight is written out once in int8.
Arch:    Ampere and newer; TMA from compute capability 9.0.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmqc.kernels.matmul import configs, scaled_matmul
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.group_scaled_matmul_tiles import (
    group_scaled_matmul_descriptor_kernel,
    group_scaled_matmul_kernel,
)
from mmqc.kernels.matmul.linears import Linear, three
from mmqc.kernels.matmul.product import (
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
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx, why_not_here
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import RowScale, row_scale
from mmqc.kernels.shared.split_k import Workspace, workspace

FOLD_ROWS = 512  # from which writing out codes times scales costs less than the passes over the accumulator
MOST_SUMS = 64  # of a group, a thread: with twice as many for all groups these are 192 of 255 registers
SMALLEST_STEP = 32  # of K: what a tensor core's int8 product takes
ANY_ROWS = MatmulConfig(128, 64, 128, 4, 3, variant="columns")  # for any number of rows from packed weights


def supports(
    x_q: Tensor, w_q: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype, group_scale: Tensor | None,
    group_size: int,
) -> str | None:
    """None, or why these operands cannot be multiplied here."""
    groups = w_scale if group_scale is None else group_scale
    shape = [w_q.shape[0], ceil_div(x_q.shape[1], group_size)]
    dtype = torch.float32 if group_scale is None else torch.int8 if group_scale.dtype == torch.int8 else torch.int32
    checks = (
        (x_q.dtype == torch.int8, f"group scales multiply sums of int8 products, not of {x_q.dtype}"),
        (list(groups.shape) == shape, f"group scales are {shape}, not {list(groups.shape)}"),
        (groups.dtype == dtype and groups.is_contiguous(), f"group scales are contiguous {dtype}, not {groups.dtype}"),
        (groups.numel() < 2**31, "scales are addressed with 32 bits"),
    )
    reason = next((why for ok, why in checks if not ok), None) or why_not_here(x_q, groups)
    return reason or scaled_matmul.supports(x_q, w_q, w_scale[:, 0] if group_scale is None else w_scale, bias, out_dtype)


def group_scaled_matmul(
    x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None = None, *, group_size: int,
    group_scale: Tensor | None = None, visual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None, config: MatmulConfig | None = None,
) -> Tensor:
    """Multiply: with ``group_scale`` the integer form, without it w_scale is [N, K/g] and the form is the float one."""
    reason = supports(x_q, w_q, w_scale, bias, out_dtype, group_scale, group_size)
    if reason is not None:
        raise ValueError(f"group_scaled_matmul: {reason}")
    m, n = x_q.shape[0], w_q.shape[0]
    y = torch.empty(m, n, dtype=out_dtype, device=x_q.device) if out is None else out
    if y.shape != (m, n) or y.dtype != out_dtype or (n > 1 and y.stride(1) != 1):
        raise ValueError(f"group_scaled_matmul: out is {out_dtype} [{m}, {n}], rows contiguous; got {list(y.shape)}")
    linear = Linear(w_q, w_scale, bias, y, group_scale)
    multiply(x_q, [linear], row_scale(x_scale, m, visual), group_size, config=config)
    return y


def op_name(linear: Linear) -> str:
    """The op's name in configs.py."""
    form = "group_float" if linear.group_scale is None else "group"
    return f"scaled_int{4 if linear.w.dtype == torch.uint8 else 8}_{form}"


def multiply(
    x_q: Tensor, linears: Sequence[Linear], rows: RowScale, group_size: int, *, config: MatmulConfig | None = None
) -> None:
    """Fill every linear's y, without a check."""
    for launch in launches(x_q, linears, rows, group_size, plan(x_q, linears, group_size, config=config)):
        launch.run()


def plan(
    x: Tensor, linears: Sequence[Linear], group_size: int, caller: Caller = EAGER, *, config: MatmulConfig | None = None
) -> list[Product]:
    """The products: several linears of few rows share one, else each has its own; scales of many rows are folded.

    Without groups (0) they are scaled_matmul.py's, here and in ``launches``.
    """
    if not group_size:
        return scaled_matmul.plan(x, linears, caller, config=config)
    (m, k), width = x.shape, sum(linear.w.shape[0] for linear in linears)
    if not m or not width:
        return []
    if m >= FOLD_ROWS and caller.always and all(folds(linear) for linear in linears):
        return each_alone(lambda linear: fold(x, linear, caller, config), linears)
    c = config or configs.config(op_name(linears[0]), m, width, k, x.device)
    if len(linears) > 1 and not share_a_launch(m, c, linears):
        return each_alone(lambda linear: plan(x, [linear], group_size, caller, config=config), linears)
    everyone, (first, *_), written_out = tuple(range(len(linears))), linears, False
    if c.variant == "unpack" and first.w.dtype == torch.uint8 and not caller.always:
        c = ANY_ROWS
    elif c.variant == "unpack":
        written_out, c = first.w.dtype == torch.uint8, c.with_variant("nested")
        first = scaled_matmul.as_codes(x, first) if written_out else first
    aligned = one_group_a_step(k, first.w, group_size, step(group_size, c.block_k))
    kernel, c = kernel_of(c, aligned and why_not_tma(x, first.w) is None)
    return [Product(kernel, c, everyone, written_out)]


def fold(x: Tensor, linear: Linear, caller: Caller, config: MatmulConfig | None) -> list[Product]:
    """Scaled_matmul's product with codes times scales."""
    products = scaled_matmul.plan(x, [scaled_matmul.as_codes(x, linear)], caller, config=config)
    return [product._replace(written_out=True, folded=True) for product in products]


def launches(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, group_size: int, products: Sequence[Product], *,
    new: New = new_tensor, work: Workspace = workspace,
) -> Iterator[Launch]:
    """Fill every linear's y."""
    if not group_size:
        yield from scaled_matmul.launches(x, linears, rows, products, new=new, work=work)
        return
    for product in products:
        some = [linears[i] for i in product.linears]
        if product.written_out:
            some = yield from scaled_matmul.writing_out(x, some, new, group_size if product.folded else 0)
        if product.folded:
            yield scaled_matmul.launch(x, some, rows, product, scaled_matmul.PLAIN, work)
        elif product.kernel == "descriptors":
            yield descriptor_launch(x, some[0], rows, group_size, product.tile)
        else:
            yield pointer_launch(x, some, rows, group_size, product.tile, work)


def folds(linear: Linear) -> bool:
    """Whether codes times scales are 8-bit integers."""
    return linear.group_scale is not None and linear.group_scale.dtype == torch.int8 and linear.w.dtype == torch.uint8


def step(group_size: int, block_k: int) -> int:
    """The largest step of K, ``block_k`` or less, that groups of this size consist of; none smaller than 32."""
    while block_k > SMALLEST_STEP and group_size % block_k:
        block_k //= 2
    return block_k


def one_group_a_step(k: int, w: Tensor, group_size: int, block_k: int) -> bool:
    """Whether every step of K, in both halves of a packed row, lies in one group."""
    half = w.shape[1] if w.dtype == torch.uint8 else 0
    return group_size % block_k == 0 and half % block_k == 0 and not (half and k % 2)


def pointer_launch(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, group: int, c: MatmulConfig, work: Workspace = workspace
) -> Launch:
    """One launch for all linears, operands read by pointers."""
    (m, k), w, integer = x.shape, linears[0].w, linears[0].group_scale is not None
    packed, stored = w.dtype == torch.uint8, w.shape[1]
    block_k = step(group, c.block_k)
    while block_k > SMALLEST_STEP and not one_group_a_step(k, w, group, block_k):
        block_k //= 2
    first, second, third = three(linears)
    b0, b1, b2 = (linear.scale if linear.bias is None else linear.bias for linear in (first, second, third))
    tiles = ceil_div(m, c.block_m) * sum(ceil_div(linear.w.shape[0], c.block_n) for linear in linears)
    kind = torch.int32 if integer else torch.float32
    parts, counters = work(x.device, tiles, c.block_m * c.block_n, c.split_k, kind)
    args = dict(
        x_ptr=x, w_ptr=first.w, w1_ptr=second.w, w2_ptr=third.w, y_ptr=first.y, y1_ptr=second.y, y2_ptr=third.y,
        x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=first.scale, w_scale1_ptr=second.scale,
        w_scale2_ptr=third.scale, group_ptr=first.groups, group1_ptr=second.groups, group2_ptr=third.groups, bias_ptr=b0,
        bias1_ptr=b1, bias2_ptr=b2, part_ptr=parts, counter_ptr=counters, M=m, N=first.w.shape[0], N1=second.w.shape[0],
        N2=third.w.shape[0], K=k, STORED=stored, GROUPS=first.groups.shape[1], stride_x=x.stride(0), stride_w=w.stride(0),
        stride_y=first.y.stride(0), stride_y1=second.y.stride(0), stride_y2=third.y.stride(0),
    )
    constants = dict(
        LINEARS=len(linears), KIND=rows.kind, HAS_BIAS=first.bias is not None, INTEGER=integer, PACKED=packed, GROUP=group,
        ALIGNED=one_group_a_step(k, w, group, block_k), EVEN_K=stored % block_k == 0 and not (packed and k % 2),
        PTX=has_inline_ptx(x.device), BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=block_k, GROUP_M=c.group_m,
        SPLIT=c.split_k > 1,
    )
    return Launch(group_scaled_matmul_kernel, (tiles, c.split_k), args, constants, scaled_matmul.OUTPUTS, c.num_warps,
                  c.num_stages, c.block_m)


def descriptor_launch(x: Tensor, linear: Linear, rows: RowScale, group: int, c: MatmulConfig) -> Launch:
    """One linear, operands read by TMA."""
    w, w_scale, bias, y, group_scale = linear
    (m, k), n, block_k = x.shape, w.shape[0], step(group, c.block_k)
    halves = 2 if c.block_m * c.block_n > MOST_SUMS * 32 * c.num_warps else 1
    args = dict(
        x_desc=x, w_desc=w, y_ptr=y, x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=w_scale, group_ptr=linear.groups,
        bias_ptr=w_scale if bias is None else bias, M=m, N=n, K=k, GROUPS=linear.groups.shape[1], stride_y=y.stride(0),
    )
    constants = dict(
        KIND=rows.kind, HAS_BIAS=bias is not None, INTEGER=group_scale is not None, GROUP=group, BLOCK_M=c.block_m,
        BLOCK_N=c.block_n // halves, BLOCK_K=block_k, GROUP_M=c.group_m, HALVES=halves,
    )
    copied = {"x_desc": (c.block_m, block_k), "w_desc": (c.block_n // halves, block_k)}
    grid = (ceil_div(m, c.block_m) * ceil_div(n, c.block_n),)
    kernel = group_scaled_matmul_descriptor_kernel
    return Launch(kernel, grid, args, constants, ("y_ptr",), c.num_warps, c.num_stages, c.block_m, copied)
