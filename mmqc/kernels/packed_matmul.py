"""The linear of many rows with 4-bit weights on Hopper, which are unpacked in registers on their way (packed_tiles.py).

Shapes:  x [M, K] int8   w packed uint8 [N, K/2]   y [M, N] fp16 | bf16 | fp32, or int8 codes; the rest as scaled_matmul.py
         mixed: x, scales and offsets of quantize_per_token.py, low part packed, high part int8   the rest as mixed_matmul.py
Exact:   int8 sums; with two parts the low one's is rounded once, as in mixed_matmul.py.
Arch:    Hopper (wgmma), as pingpong_matmul.py and for the same launches; K, or its low part, is a multiple of 64.
Tiles:   variant "registers": 128 rows of w and ``block_m`` of x, ``per_sm`` programs a multiprocessor, which share its memory;
         ``num_stages``: slots, as many as fit.  Taken where a tuned file names it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mmqc.kernels import pingpong_matmul as pingpong
from mmqc.kernels.configs import MatmulConfig
from mmqc.kernels.device_facts import ceil_div, has_inline_ptx, multiprocessors
from mmqc.kernels.epilogue_tiles import Epilogue
from mmqc.kernels.launch import Launch
from mmqc.kernels.linears import Linear
from mmqc.kernels.quantize_per_token import Rows
from mmqc.kernels.row_scale import RowScale
from mmqc.kernels.split_k import Workspace, workspace

OP, MIXED = "packed_int4", "packed_mixed"  # in configs.py
STEP = 64  # packed columns of a step, or half of them where that does not divide their number
SHARED = 230_400  # bytes of a multiprocessor, without what its programs need besides


def why_not(x: Tensor, w: Tensor, y: Tensor, low: int) -> str | None:
    """None, or why x is not multiplied by packed w, of ``low`` columns, in this way."""
    if not pingpong.here(x.device):
        return "warpgroup products are Hopper's"
    if x.dtype != torch.int8 or w.dtype != torch.uint8:
        return f"x is int8 and w packed, not {x.dtype} and {w.dtype}"
    if not fits(low):
        return f"K = {low} is no multiple of {STEP}"
    if any(t.stride(0) * t.dtype.itemsize % 16 or t.data_ptr() % 16 for t in (x, w, y)):
        return "tensor descriptors need rows and addresses that are multiples of 16 bytes"
    return None


def fits(low: int) -> bool:
    """Whether a packed weight of so many columns has whole steps."""
    return low % STEP == 0


def fitted(c: MatmulConfig, stored: int, item_bytes: int) -> MatmulConfig:
    """The tile with steps that divide ``stored`` columns, and as many slots as fit, at most ``num_stages``."""
    if c.block_n % 64 or c.num_warps != 4:
        raise ValueError(f"packed_matmul: one warpgroup of 4 warps has a multiple of 64 rows of w, not {c}")
    block_k = c.block_k if stored % c.block_k == 0 else STEP // 2
    room = SHARED // c.per_sm - 1024 - c.block_m * c.block_n * item_bytes
    fit = room // ((2 * c.block_m + c.block_n) * block_k)
    if fit < 2:
        raise ValueError(f"{c} with {item_bytes} bytes an output leaves no shared memory for two slots")
    return dataclasses.replace(c, block_k=block_k, num_stages=min(c.num_stages, fit))


def grid(c: MatmulConfig, m: int, n: int, steps: int, device: torch.device) -> tuple[int, int, int, int]:
    """(Programs that are launched, those of a whole round, tiles of the last one, parts of such a tile)."""
    tiles, whole = ceil_div(m, c.block_m) * ceil_div(n, c.block_n), c.per_sm * multiprocessors(device)
    count = pingpong.parts(tiles, steps * c.block_k // STEP, whole, c.split_k)
    count = count if (count - 1) * ceil_div(steps, count) < steps else 1
    return (whole if tiles >= whole else tiles * count), whole, tiles % whole, count


def blocks(c: MatmulConfig) -> dict[str, tuple[int, int]]:
    """What TMA copies."""
    of_w = (c.block_n, c.block_k)
    return {"x_desc": (c.block_m, c.block_k), "w_desc": of_w, "high_desc": of_w, "y_desc": (c.block_m, c.block_n)}


def launch(
    x: Tensor, linear: Linear, rows: RowScale, residual: Tensor | None, c: MatmulConfig, epilogue: Epilogue,
    work: Workspace = workspace,
) -> Launch:  # fmt: skip
    """Fill the linear's y; ``why_not`` has found nothing."""
    from mmqc.kernels.packed_tiles import packed_scaled_kernel

    w, w_scale, bias, y = linear
    m, (n, stored) = x.shape[0], w.shape
    c = fitted(c, stored, y.dtype.itemsize)
    programs, whole, rest, count = grid(c, m, n, stored // c.block_k, x.device)
    part, counter = work(x.device, rest, c.block_m * c.block_n, count, torch.int32)
    low, rank = epilogue.of_one(w_scale)
    args: dict[str, Any] = dict(
        x_desc=x, w_desc=w, y_desc=y, x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=w_scale,
        bias_ptr=w_scale if bias is None else bias, residual_ptr=w_scale if residual is None else residual, part_ptr=part,
        counter_ptr=counter, M=m, N=n, STORED=stored, stride_r=0 if residual is None else residual.stride(0),
        **epilogue.args(w_scale), **low,
    )  # fmt: skip
    constants = dict(
        KIND=rows.kind, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, PTX=has_inline_ptx(x.device),
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=whole, PARTS=count,
        STAGES=c.num_stages, **epilogue.constants(), **rank,
    ) | {"ROUND": pingpong.ROUND[epilogue.dtype]}  # fmt: skip
    copied = {k: v for k, v in blocks(c).items() if k != "high_desc"}
    outputs = ("y_desc", "part_ptr", "counter_ptr")
    return Launch(packed_scaled_kernel, (programs,), args, constants, outputs, 4, 1, 0, copied, early=True)


def mixed_launch(
    x: Rows, low: Tensor, high: Tensor, w_scale: Tensor, w_sum: Tensor, bias: Tensor | None, y: Tensor, c: MatmulConfig,
    work: Workspace = workspace,
) -> Launch:  # fmt: skip
    """Fill ``y`` from a packed low part and a high one; ``why_not`` has found nothing."""
    from mmqc.kernels.packed_tiles import packed_mixed_kernel

    (m, k), (n, stored) = x.q.shape, low.shape
    c = fitted(c, stored, y.dtype.itemsize)
    steps = stored // c.block_k + ceil_div(high.shape[1], c.block_k)
    programs, whole, rest, count = grid(c, m, n, steps, x.q.device)
    part, counter = work(x.q.device, rest, c.block_m * c.block_n, count, torch.int32)
    args: dict[str, Any] = dict(
        x_desc=x.q, w_desc=low, high_desc=high.view(torch.uint8), y_desc=y, x_scale_ptr=x.scale, x_offset_ptr=x.offset,
        w_scale_ptr=w_scale, w_sum_ptr=w_sum, bias_ptr=w_scale if bias is None else bias, part_ptr=part, counter_ptr=counter,
        M=m, N=n, STORED=stored, LOW=k - high.shape[1], HIGH=high.shape[1],
    )  # fmt: skip
    constants = dict(
        HAS_BIAS=bias is not None, BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=whole,
        PARTS=count, STAGES=c.num_stages,
    )  # fmt: skip
    outputs = ("y_desc", "part_ptr", "counter_ptr")
    return Launch(packed_mixed_kernel, (programs,), args, constants, outputs, 4, 1, 0, blocks(c), early=True)
