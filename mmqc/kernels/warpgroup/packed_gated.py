"""Gate and up of a few dozen rows, 4-bit weights, with what follows in one launch on Hopper (packed_gated_tiles.py).

Shapes:  x [M, K] int8   both w packed uint8 [N, K/2]   y [M, N] fp16 | bf16 | fp32, or int8 codes
Exact:   as packed_matmul.py; z, f(z) and the product are rounded as in scaled_matmul_epilogue.py.
Arch:    Hopper, as packed_matmul.py.
Rows:    more than packed_matmul.FEW, up to MOST: of 128 a 7B decoder's gate and up gain nothing.
Bytes:   y is written once, a byte an entry for codes: in parts 2 + 2 are written and read, and a launch more.
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
from mmqc.kernels.shared.early_start import early_lines
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import RowScale
from mmqc.kernels.shared.split_k import Workspace, workspace
from mmqc.kernels.warpgroup import pingpong_matmul as pingpong
from mmqc.kernels.warpgroup.packed_matmul import BEHIND, FEW, as_few_as_fit, halves

MOST = 64
COLUMNS = 64  # of y in a tile: as many rows of each weight
OUTPUTS = ("y_desc", "part_ptr", "counter_ptr")


def takes(rows: int) -> bool:
    """Whether so many rows are for one launch."""
    return FEW < rows <= MOST


def tile(rows: int) -> MatmulConfig:
    """Programs that share a multiprocessor by twos, with as many slots as fit."""
    block_m = 32 if rows <= 32 else 64
    return MatmulConfig(block_m, 2 * COLUMNS, 64, 4, 8 if rows <= 32 else 6, split_k=16, per_sm=2, variant="registers")


def launch(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue, work: Workspace = workspace
) -> Launch:
    """Fill the first linear's y."""
    from mmqc.kernels.warpgroup.packed_gated_tiles import packed_gated_kernel

    (w0, s0, b0, y, _), (w1, s1, b1, _, _) = linears
    (m, (n, stored)), columns = (x.shape[0], w0.shape), c.block_n // 2
    ahead, cut = c.num_stages - BEHIND, as_few_as_fit(c, y.dtype.itemsize, 2 * max(c.block_m, c.block_n))
    half, steps = dataclasses.replace(c, block_n=columns), max(ceil_div(stored, c.block_k), ahead)
    programs, whole, rest, count = pingpong.grid(half, m, n, steps, x.device, ahead)
    part, counter = work(x.device, 2 * rest, c.block_m * columns, count, torch.int32, True)
    args: dict[str, Any] = dict(
        **halves(x, stored), w_desc=w0, w1_desc=w1, y_desc=y, w_ptr=w0, w1_ptr=w1, x_scale_ptr=rows.scale, row_ptr=rows.rows,
        w_scale_ptr=s0, w_scale1_ptr=s1, bias_ptr=s0 if b0 is None else b0, bias1_ptr=s1 if b1 is None else b1,
        part_ptr=part, counter_ptr=counter, M=m, N=n, STORED=stored, stride_w=w0.stride(0), stride_w1=w1.stride(0),
        **epilogue.args(s0),
    )
    constants = dict(
        KIND=rows.kind, HAS_BIAS=b0 is not None, PTX=has_inline_ptx(x.device), BLOCK_M=c.block_m, COLUMNS=columns,
        BLOCK_K=c.block_k, GROUP_M=c.group_m, PROGRAMS=whole, PARTS=count, SHARES=cut, SLOTS=c.num_stages,
        LINES=early_lines(x.device, c.block_m), **epilogue.constants(),
    ) | {"ROUND": pingpong.ROUND[epilogue.dtype]}
    x_block, w_block = (c.block_m, c.block_k), (columns, c.block_k)
    copied = dict(x_desc=x_block, upper_desc=x_block, w_desc=w_block, w1_desc=w_block, y_desc=(c.block_m // cut, columns))
    return Launch(packed_gated_kernel, (programs,), args, constants, OUTPUTS, 4, 1, 0, copied, early=True)
