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

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mmqc.kernels.matmul import scaled_matmul as plain
from mmqc.kernels.matmul.configs import PERSISTENT, MatmulConfig
from mmqc.kernels.matmul.configs import config as choose
from mmqc.kernels.matmul.group_scaled_matmul_tiles import (
    group_scaled_matmul_descriptor_kernel,
    group_scaled_matmul_kernel,
)
from mmqc.kernels.matmul.unpack_weight import unpack_weight
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx, why_not_here
from mmqc.kernels.shared.row_scale import RowScale, row_scale
from mmqc.kernels.shared.split_k import workspace

FOLD_ROWS = 512  # from which writing out codes times scales costs less than the passes over the accumulator
MOST_SUMS = 64  # of a group, a thread: with twice as many for all groups these are 192 of 255 registers
SMALLEST_STEP = 32  # of K: what a tensor core's int8 product takes


class Linear(NamedTuple):
    """One linear of a launch: weight, scale [N] or [N, K/g], bias, result, integer scales if there are any."""

    w: Tensor
    scale: Tensor
    bias: Tensor | None
    y: Tensor
    group_scale: Tensor | None

    @property
    def groups(self) -> Tensor:
        """What multiplies the sums of groups."""
        return self.scale if self.group_scale is None else self.group_scale


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
    return reason or plain.supports(x_q, w_q, w_scale[:, 0] if group_scale is None else w_scale, bias, out_dtype)


def group_scaled_matmul(
    x_q: Tensor, w_q: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None = None, *, group_size: int,
    group_scale: Tensor | None = None, visual: Tensor | None = None, split: Tensor | None = None,
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
    multiply(x_q, [linear], row_scale(x_scale, m, visual, split), group_size, config=config)
    return y


def op_name(linear: Linear) -> str:
    """The op's name in configs.py."""
    form = "group_float" if linear.group_scale is None else "group"
    return f"scaled_int{4 if linear.w.dtype == torch.uint8 else 8}_{form}"


def multiply(
    x_q: Tensor, linears: list[Linear], rows: RowScale, group_size: int, *, config: MatmulConfig | None = None
) -> None:
    """Fill every linear's y, without a check: several linears of few rows in one launch, else one after the other."""
    m, k = x_q.shape
    width = sum(linear.w.shape[0] for linear in linears)
    if not m or not width:
        return
    if m >= FOLD_ROWS and all(folds(linear) for linear in linears):
        for w, scale, bias, y, times in linears:
            whole = unpack_weight(w, k, bits=4, scale=times, group_size=group_size)
            plain.multiply(x_q, [plain.Linear(whole, scale, bias, y)], rows, config=config)
        return
    c = config or choose(op_name(linears[0]), m, width, k, x_q.device)
    if len(linears) > 1 and not (m <= plain.FEW_ROWS and c.variant == "columns" and alike(linears)):
        for linear in linears:
            multiply(x_q, [linear], rows, group_size, config=config)
        return
    if c.variant == "unpack":
        if linears[0].w.dtype == torch.uint8:
            linears = [linear._replace(w=unpack_weight(linear.w, k, bits=4)) for linear in linears]
        c = c.with_variant("nested")
    block_k = step(group_size, c.block_k)
    aligned = one_group_a_step(k, linears[0].w, group_size, block_k)
    if c.variant in PERSISTENT and aligned and plain.descriptor_reason(x_q, linears[0].w) is None:
        _launch_descriptors(x_q, linears[0], rows, group_size, block_k, c)
    else:
        c = c.with_stages(3) if c.variant in PERSISTENT else c
        _launch_pointers(x_q, linears, rows, group_size, c)


def folds(linear: Linear) -> bool:
    """Whether codes times scales are 8-bit integers."""
    return linear.group_scale is not None and linear.group_scale.dtype == torch.int8 and linear.w.dtype == torch.uint8


def alike(linears: list[Linear]) -> bool:
    """Whether one launch can take these linears."""
    scales = [linear.group_scale for linear in linears]
    kinds = {None if t is None else (t.shape[1:], t.dtype) for t in scales}
    return len(kinds) == 1 and plain.alike([plain.Linear(*linear[:4]) for linear in linears])


def step(group_size: int, block_k: int) -> int:
    """The largest step of K, ``block_k`` or less, that groups of this size consist of; none smaller than 32."""
    while block_k > SMALLEST_STEP and group_size % block_k:
        block_k //= 2
    return block_k


def one_group_a_step(k: int, w: Tensor, group_size: int, block_k: int) -> bool:
    """Whether every step of K, in both halves of a packed row, lies in one group."""
    half = w.shape[1] if w.dtype == torch.uint8 else 0
    return group_size % block_k == 0 and half % block_k == 0 and not (half and k % 2)


def _launch_pointers(x: Tensor, linears: list[Linear], rows: RowScale, group: int, c: MatmulConfig) -> None:
    (m, k), w, integer = x.shape, linears[0].w, linears[0].group_scale is not None
    packed, stored = w.dtype == torch.uint8, w.shape[1]
    block_k = step(group, c.block_k)
    while block_k > SMALLEST_STEP and not one_group_a_step(k, w, group, block_k):
        block_k //= 2
    three = (linears + linears[-1:] * 2)[:3]  # what is not there is not read
    biases = tuple(linear.scale if linear.bias is None else linear.bias for linear in three)
    tiles = ceil_div(m, c.block_m) * sum(ceil_div(linear.w.shape[0], c.block_n) for linear in linears)
    kind = torch.int32 if integer else torch.float32
    parts, counters = workspace(x.device, tiles, c.block_m * c.block_n, c.split_k, kind)
    group_scaled_matmul_kernel[(tiles, c.split_k)](
        x, *(t.w for t in three), *(t.y for t in three), rows.scale, rows.rows, *(t.scale for t in three),
        *(t.groups for t in three), *biases, parts, counters,
        m, *(t.w.shape[0] for t in three), k, stored, linears[0].groups.shape[1], x.stride(0), w.stride(0),
        *(t.y.stride(0) for t in three),
        LINEARS=len(linears), KIND=rows.kind, HAS_BIAS=linears[0].bias is not None, INTEGER=integer, PACKED=packed,
        GROUP=group, ALIGNED=one_group_a_step(k, w, group, block_k),
        EVEN_K=stored % block_k == 0 and not (packed and k % 2), PTX=has_inline_ptx(x.device),
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=block_k, GROUP_M=c.group_m, SPLIT=c.split_k > 1,
        num_warps=c.num_warps, num_stages=c.num_stages,
    )


def _launch_descriptors(x: Tensor, linear: Linear, rows: RowScale, group: int, block_k: int, c: MatmulConfig) -> None:
    w, w_scale, bias, y, group_scale = linear
    (m, k), n = x.shape, w.shape[0]
    halves = 2 if c.block_m * c.block_n > MOST_SUMS * 32 * c.num_warps else 1
    group_scaled_matmul_descriptor_kernel[(ceil_div(m, c.block_m) * ceil_div(n, c.block_n),)](
        TensorDescriptor.from_tensor(x, [c.block_m, block_k]),
        TensorDescriptor.from_tensor(w, [c.block_n // halves, block_k]),
        y, rows.scale, rows.rows, w_scale, linear.groups, w_scale if bias is None else bias,
        m, n, k, linear.groups.shape[1], y.stride(0),
        KIND=rows.kind, HAS_BIAS=bias is not None, INTEGER=group_scale is not None, GROUP=group,
        BLOCK_M=c.block_m, BLOCK_N=c.block_n // halves, BLOCK_K=block_k, GROUP_M=c.group_m, HALVES=halves,
        num_warps=c.num_warps, num_stages=c.num_stages,
    )
