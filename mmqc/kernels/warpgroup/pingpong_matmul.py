"""The quantized linear of many rows on Hopper: copies, products and epilogues in warps of their own (pingpong_tiles.py).

Shapes:  x [M, K], w [N, K] int8 | fp8e4nv   y [M, N] fp16 | bf16 | fp32, or int8 codes; the rest as scaled_matmul.py
Exact:   int8 sums; the parts of a tile of the last round are added in a fixed order, so that fp8 sums are reproducible.
Arch:    Hopper (wgmma); rows and addresses of x, w and y are multiples of 16 bytes.  Not in the interpreter, which runs the
         warps of a program one after the other; and not in a package or for a number of rows that is not known, for what
         compiles there takes no Gluon.  All of these run scaled_matmul_tiles.py's kernels.
Tiles:   ``num_warps`` 4: two consumers, each with a tile; 8: one with a larger tile.  ``num_stages``: slots, as many as fit.
         ``split_k``: at most so many parts of a tile of the last round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.product import why_not_aligned
from mmqc.kernels.shared.device_facts import (
    CONSUMER_REGISTERS,
    SHARED_BYTES,
    ceil_div,
    has_inline_ptx,
    has_warpgroup_products,
    multiprocessors,
)
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import RowScale
from mmqc.kernels.shared.split_k import Workspace, workspace

OPS = {
    "scaled_int8": "pingpong_int8",
    "scaled_fp8": "pingpong_fp8",
}  # names in configs.py: all kernels, and those of any launch
OUTPUTS = ("y_desc", "part_ptr", "counter_ptr")
LEAST_SAVED = 12  # steps of K, for a tile to be cut: about what its parts spend on one another, 4 microseconds
ROUND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODES = (torch.int8, torch.float8_e4m3fn)


def why_not(x: Tensor, w: Tensor, y: Tensor) -> str | None:
    """None, or why these operands are not multiplied in this way."""
    if not has_warpgroup_products(x.device):
        return "warpgroup products are Hopper's"
    if x.dtype not in CODES or w.dtype != x.dtype:
        return f"x and w are codes of one type, int8 or float8_e4m3fn, not {x.dtype} and {w.dtype}"
    return why_not_aligned(x, w, y)


def slots(c: MatmulConfig, item_bytes: int, columns: int | None = None) -> int:
    """As many slots as fit beside the tiles of y, of ``columns`` if those are not the tile's; at most ``num_stages``."""
    tiles_of_y = (8 // c.num_warps) * c.block_m * (columns or c.block_n) * item_bytes
    fit = (SHARED_BYTES - tiles_of_y) // ((c.block_m + c.block_n) * c.block_k)
    if fit < 2:
        raise ValueError(f"{c} with {item_bytes} bytes an output leaves no shared memory for two slots")
    return min(c.num_stages, fit)


def parts(tiles: int, steps: int, programs: int, most: int, least: int = 1) -> int:
    """Into how many parts the tiles of the last round are cut along K: 1, or a power of two up to ``most``.

    Each has a program and ``least`` steps, and cutting saves LEAST_SAVED.
    """
    rest = tiles % programs
    fit = [p for p in (2, 4, 8, 16) if p <= most and rest and rest * p <= programs and steps - ceil_div(steps, p) >= LEAST_SAVED
           and steps - (p - 1) * ceil_div(steps, p) >= least]
    return max(fit, default=1)


def grid(
    c: MatmulConfig, m: int, n: int, steps: int, device: torch.device, least: int = 1
) -> tuple[int, int, int, int]:
    """(Programs that are launched, programs of a whole round, tiles of the last one, parts of such a tile)."""
    tiles, whole = ceil_div(m, c.block_m) * ceil_div(n, c.block_n), c.per_sm * multiprocessors(device)
    count = parts(tiles, steps, whole, c.split_k, least)
    return (whole if tiles >= whole else tiles * count), whole, tiles % whole, count


def blocks(c: MatmulConfig) -> dict[str, tuple[int, int]]:
    """What TMA copies."""
    return {"x_desc": (c.block_m, c.block_k), "w_desc": (c.block_n, c.block_k), "y_desc": (c.block_m, c.block_n)}


def shape_constants(c: MatmulConfig, whole: int, count: int, item_bytes: int, columns: int | None = None) -> dict[str, int]:
    """The kernels' constants that a tile decides."""
    return dict(
        BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=whole, PARTS=count,
        STAGES=slots(c, item_bytes, columns), WARPS=c.num_warps, CONSUMERS=8 // c.num_warps, REGISTERS=CONSUMER_REGISTERS,
    )


def launch(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue,
    work: Workspace = workspace,
) -> Launch:
    """Fill the one linear's y; ``why_not`` has found nothing."""
    from mmqc.kernels.warpgroup.pingpong_tiles import scaled_pingpong_kernel

    [(w, w_scale, bias, y, _)] = linears
    (m, k), n = x.shape, w.shape[0]
    programs, whole, rest, count = grid(c, m, n, ceil_div(k, c.block_k), x.device)
    sums = torch.int32 if x.dtype == torch.int8 else torch.float32
    part, counter = work(x.device, rest, c.block_m * c.block_n, count, sums)
    low, rank = epilogue.of_one(w_scale)
    args: dict[str, Any] = dict(
        x_desc=x, w_desc=w, y_desc=y, x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=w_scale,
        bias_ptr=w_scale if bias is None else bias, part_ptr=part, counter_ptr=counter, M=m, N=n, K=k,
        **epilogue.args(w_scale), **low,
    )
    constants = dict(
        KIND=rows.kind, HAS_BIAS=bias is not None, PTX=has_inline_ptx(x.device),
        **epilogue.constants(), **rank, **shape_constants(c, whole, count, y.dtype.itemsize),
    ) | {"ROUND": ROUND[epilogue.dtype]}
    return Launch(
        scaled_pingpong_kernel, (programs,), args, constants, OUTPUTS, c.num_warps, 1, 0, blocks(c), early=True
    )
