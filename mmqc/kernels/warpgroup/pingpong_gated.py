"""Gate and up of many rows on Hopper, with what follows in one launch (pingpong_gated_tiles.py).

Shapes:  x [M, K], both w [N, K] int8   y [M, N] fp16 | bf16 | fp32, or int8 codes
Exact:   as pingpong_matmul.py; z, f(z) and the product are rounded as in scaled_matmul_epilogue.py.
Arch:    Hopper, as pingpong_matmul.py and for the same launches.
Tiles:   half of whose columns are the gate's: what a product reads stays what it was.
Bytes:   y is written once, a byte an entry for codes; in two products the gate's z, 2 bytes an entry, is written and read besides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.shared.device_facts import ceil_div, has_inline_ptx
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import RowScale
from mmqc.kernels.shared.split_k import Workspace, workspace
from mmqc.kernels.warpgroup import pingpong_matmul as pingpong

TILE = MatmulConfig(128, 128, 128, 4, 8, split_k=4, variant="pingpong")
WIDE = MatmulConfig(64, 256, 128, 4, 8, split_k=4, variant="pingpong")
LINE, CACHED = 128, 50 << 20  # bytes of a line of memory; of y, that Hopper's second cache holds


def tile(rows: int, columns: int, item_bytes: int) -> MatmulConfig:
    """For y of such a size.

    TILE writes half a line of codes at a time.  Of a y that the cache does not hold it takes 1,416 us for 1,358 by WIDE (6,417 x
    18,944 x 3,584), of one that it does 427 for 436 (2,048 rows; H200); numbers, whole lines, 1,303 for 1,370.
    """
    half_lines = TILE.block_n // 2 * item_bytes < LINE
    return WIDE if half_lines and rows * columns * item_bytes > CACHED else TILE


def launch(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue, work: Workspace = workspace
) -> Launch:
    """Fill the first linear's y; ``pingpong_matmul.why_not`` has found nothing for either weight."""
    from mmqc.kernels.warpgroup.pingpong_gated_tiles import gated_pingpong_kernel

    (w0, s0, b0, y, _), (w1, s1, b1, _, _) = linears
    (m, k), n, columns = x.shape, w0.shape[0], c.block_n // 2
    half = dataclasses.replace(c, block_n=columns)
    programs, whole, rest, count = pingpong.grid(half, m, n, ceil_div(k, c.block_k), x.device)
    part, counter = work(x.device, rest, c.block_m * c.block_n, count, torch.int32)
    args: dict[str, Any] = dict(
        x_desc=x, w_desc=w0, w1_desc=w1, y_desc=y, x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=s0, w_scale1_ptr=s1,
        bias_ptr=s0 if b0 is None else b0, bias1_ptr=s1 if b1 is None else b1, part_ptr=part, counter_ptr=counter, M=m, N=n, K=k,
        **epilogue.args(s0),
    )
    constants = dict(
        KIND=rows.kind, HAS_BIAS=b0 is not None, PTX=has_inline_ptx(x.device), **epilogue.constants(),
        **pingpong.shape_constants(c, whole, count, y.dtype.itemsize, columns),
    ) | {"ROUND": pingpong.ROUND[epilogue.dtype]}
    w_block = (columns, c.block_k)
    copied = dict(x_desc=(c.block_m, c.block_k), w_desc=w_block, w1_desc=w_block, y_desc=(c.block_m, columns))
    return Launch(gated_pingpong_kernel, (programs,), args, constants, pingpong.OUTPUTS, c.num_warps, 1, 0, copied, early=True)
