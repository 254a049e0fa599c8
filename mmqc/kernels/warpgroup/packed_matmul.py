"""The linear of more than a few rows with 4-bit weights on Hopper, which are unpacked in registers on their way (packed_tiles.py).

Shapes:  x [M, K] int8   w packed uint8 [N, K/2]   y [M, N] fp16 | bf16 | fp32, or int8 codes; the rest as scaled_matmul.py
         mixed: x, scales and offsets of quantize_per_token.py, low part packed, high part int8   the rest as mixed_matmul.py
Exact:   int8 sums; with two parts the low one's is rounded once, as in mixed_matmul.py.
Arch:    Hopper (wgmma), as pingpong_matmul.py and for the same launches; K, or its low part, is a multiple of 32.
Rows:    more than FEW; up to 512 several linears of an input are one launch (product.py).
Tiles:   variant "registers": ``block_n`` rows of w and ``block_m`` of x, ``per_sm`` programs a multiprocessor, which share its
         memory; each has ``num_stages`` slots of ``block_k`` packed columns and room for a share of y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear, three
from mmqc.kernels.matmul.product import why_not_aligned
from mmqc.kernels.shared.device_facts import SHARED_BYTES, ceil_div, has_inline_ptx, has_warpgroup_products
from mmqc.kernels.shared.early_start import early_lines
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import Rows, RowScale
from mmqc.kernels.shared.split_k import Workspace, workspace
from mmqc.kernels.warpgroup import pingpong_matmul as pingpong

OP, MIXED = "packed_int4", "packed_mixed"  # in configs.py
BLOCK_K = (64, 128)  # of a tile: what TMA lays out without conflicts
ALIGN = 32  # columns: half of them are whole 16 bytes, of w and of a half of x
BEHIND = 2  # packed_tiles.py's
FEW = 16  # rows up to which kernels of pointers are faster
ADDED = 128  # rows up to which parts of a tile are added up in memory: of 512 a product of 7B takes 20 us for 15 so
BARRIERS = 128  # bytes
OUTPUTS = ("y_desc", "y1_desc", "y2_desc", "part_ptr", "counter_ptr")


def why_not(x: Tensor, w: Tensor, y: Tensor, low: int) -> str | None:
    """None, or why x is not multiplied by packed w, of ``low`` columns, in this way."""
    if not has_warpgroup_products(x.device):
        return "warpgroup products are Hopper's"
    if x.dtype != torch.int8 or w.dtype != torch.uint8:
        return f"x is int8 and w packed, not {x.dtype} and {w.dtype}"
    if not fits(low):
        return f"K = {low} is no multiple of {ALIGN}"
    return why_not_aligned(x, w, y)


def fits(low: int) -> bool:
    """Whether TMA takes a packed weight of so many columns."""
    return low % ALIGN == 0


def shares(c: MatmulConfig, item_bytes: int, kept: int) -> int:
    """Into how many shares a tile of y is cut: as few as leave room for the slots, and ``kept`` floats."""
    if c.block_n % 64 or c.block_m % 16 or c.block_k not in BLOCK_K or c.num_warps != 4 or c.num_stages <= BEHIND:
        raise ValueError(
            f"packed_matmul: 4 warps have a multiple of 64 rows of w and of 16 of x, more than {BEHIND} slots of {BLOCK_K}, "
            f"not {c}"
        )
    return as_few_as_fit(c, item_bytes, kept)


def as_few_as_fit(c: MatmulConfig, item_bytes: int, kept: int = 0) -> int:
    """``shares`` of a kernel whose slots have a tile of w and two of x, or one in 16 bits."""
    room = SHARED_BYTES // c.per_sm - BARRIERS - 4 * kept - c.num_stages * (2 * c.block_m + c.block_n) * c.block_k
    fit = [n for n in (1, 2, 4, 8) if c.block_m * c.block_n * item_bytes // n <= room]
    if not fit:
        raise ValueError(f"{c} with {item_bytes} bytes an output leaves no shared memory for its slots")
    return fit[0]


def halves(x: Tensor, stored: int) -> dict[str, Tensor]:
    """The columns of x that meet the lower four bits of packed ones, and those that meet the upper."""
    return {"x_desc": x[:, :stored], "upper_desc": x[:, stored : 2 * stored]}


def blocks(c: MatmulConfig, count: int) -> dict[str, tuple[int, int]]:
    """What TMA copies; ``count`` shares of y."""
    found = pingpong.blocks(c)
    return found | {"upper_desc": found["x_desc"], "y_desc": (c.block_m // count, c.block_n)}


def launch(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue, work: Workspace = workspace
) -> Launch:
    """Fill every linear's y; ``why_not`` has found nothing."""
    from mmqc.kernels.warpgroup.packed_tiles import packed_scaled_kernel

    (w0, w1, w2), (s0, s1, s2), biases, (y0, y1, y2), _ = zip(*three(linears), strict=True)
    b0, b1, b2 = (s if b is None else b for s, b in zip((s0, s1, s2), biases, strict=True))
    m, stored = x.shape[0], w0.shape[1]
    width = sum(ceil_div(linear.w.shape[0], c.block_n) for linear in linears) * c.block_n
    cut = shares(c, y0.dtype.itemsize, max(c.block_m, c.block_n))
    ahead = c.num_stages - BEHIND
    programs, whole, rest, count = pingpong.grid(c, m, width, max(ceil_div(stored, c.block_k), ahead), x.device, ahead)
    part, counter = work(x.device, rest, c.block_m * c.block_n, count, torch.int32, m <= ADDED)
    low, rank = epilogue.of_one(s0)
    args: dict[str, Any] = dict(
        **halves(x, stored), w_desc=w0, w1_desc=w1, w2_desc=w2, y_desc=y0, y1_desc=y1, y2_desc=y2, w_ptr=w0, w1_ptr=w1, w2_ptr=w2,
        x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=s0, w_scale1_ptr=s1, w_scale2_ptr=s2, bias_ptr=b0, bias1_ptr=b1,
        bias2_ptr=b2, part_ptr=part, counter_ptr=counter, M=m, N=w0.shape[0], N1=w1.shape[0], N2=w2.shape[0], STORED=stored,
        stride_w=w0.stride(0), **epilogue.args(s0), **low,
    )
    constants = dict(
        LINEARS=len(linears), KIND=rows.kind, HAS_BIAS=biases[0] is not None,
        PTX=has_inline_ptx(x.device), BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=whole,
        PARTS=count, SHARES=cut, SLOTS=c.num_stages, LINES=early_lines(x.device, c.block_m), ADDED=m <= ADDED,
        **epilogue.constants(), **rank,
    ) | {"ROUND": pingpong.ROUND[epilogue.dtype]}
    copied = blocks(c, cut)
    copied |= {f"{name}{i}_desc": copied[f"{name}_desc"] for name in "wy" for i in (1, 2)}
    return Launch(packed_scaled_kernel, (programs,), args, constants, OUTPUTS, 4, 1, 0, copied, early=True)


def mixed_launch(
    x: Rows, low: Tensor, high: Tensor, w_scale: Tensor, w_sum: Tensor, bias: Tensor | None, y: Tensor, c: MatmulConfig,
    work: Workspace = workspace,
) -> Launch:
    """Fill ``y`` from a packed low part and a high one; ``why_not`` has found nothing."""
    from mmqc.kernels.warpgroup.packed_tiles import packed_mixed_kernel

    (m, k), (n, stored) = x.q.shape, low.shape
    cut = shares(c, y.dtype.itemsize, 4 * c.block_m + 5 * c.block_n)
    steps = ceil_div(stored, c.block_k) + ceil_div(high.shape[1], c.block_k)
    programs, whole, rest, count = pingpong.grid(c, m, n, steps, x.q.device, c.num_stages - BEHIND)
    part, counter = work(x.q.device, rest, c.block_m * c.block_n, count, torch.int32)
    args: dict[str, Any] = dict(
        **halves(x.q, stored), high_x_desc=x.q[:, k - high.shape[1] :], w_desc=low, high_desc=high.view(torch.uint8), y_desc=y,
        x_scale_ptr=x.scale, x_offset_ptr=x.offset, w_scale_ptr=w_scale, w_sum_ptr=w_sum,
        bias_ptr=w_scale if bias is None else bias, part_ptr=part, counter_ptr=counter, M=m, N=n, STORED=stored,
        HIGH=high.shape[1],
    )
    constants = dict(
        HAS_BIAS=bias is not None, BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=whole,
        PARTS=count, SHARES=cut, SLOTS=c.num_stages,
    )
    copied = blocks(c, cut) | {"high_x_desc": (c.block_m, c.block_k), "high_desc": (c.block_n, c.block_k)}
    return Launch(packed_mixed_kernel, (programs,), args, constants, pingpong.OUTPUTS, 4, 1, 0, copied, early=True)
