"""The quantized linear with an activation, a gate and the next quantization in its epilogue (ops/scaled_matmul_epilogue.py).

    one linear      scaled_matmul's kernels, whose epilogue goes on
    gate and up     gated_matmul_tiles.py: both tiles in one program;  or, of many rows on Hopper, the gate's z is written, and read
                    in the epilogue of the other product: two tiles of half the columns move more, and hide less

Shapes:  those of scaled_matmul.py, int8 x_q; y [M, N] in z's dtype, or int8
Bytes:   y is written once: 1 byte an entry for codes, where the unfused form moves 5 (z out, z in, codes out), with a gate 9.
Cost:    the arithmetic of f and of the rounding runs in the epilogue, where the tensor cores of that program wait: some twenty
         instructions an entry.  Above K of about a thousand the bytes saved are worth more (docs/explanation/epilogues.md).
Arch:    as scaled_matmul.py.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mmqc.kernels.matmul.configs import PERSISTENT, MatmulConfig
from mmqc.kernels.matmul.configs import config as choose
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.gated_matmul_tiles import gated_matmul_descriptor_kernel, gated_matmul_kernel
from mmqc.kernels.matmul.scaled_matmul import (
    BY_GLUON,
    Linear,
    descriptor_launch,
    descriptor_reason,
    op_name,
    pointer_launch,
)
from mmqc.kernels.matmul.scaled_matmul import tile as tile_of
from mmqc.kernels.matmul.unpack_weight import unpack_weight
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS, ceil_div, has_inline_ptx, has_warpgroup_products, multiprocessors
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import RowScale
from mmqc.kernels.shared.split_k import Workspace, workspace

LEAST_N = 16  # of a tile


def overlapped(c: MatmulConfig) -> MatmulConfig:
    """A persistent tile with two programs a multiprocessor: while one is in its epilogue, the other multiplies."""
    if c.variant not in PERSISTENT or c.per_sm > 1 or c.block_m * c.block_n <= 128 * 128:
        return c
    return dataclasses.replace(c, block_m=128, block_n=128, num_warps=4, num_stages=3, per_sm=2, tail=0)


def tile(c: MatmulConfig, linears: int) -> MatmulConfig:
    """How a tile is run with an epilogue: of two linears each has half of its columns.

    Persistent programs have two nested loops: one flattened loop holds the epilogue twice, and spills.  Where the columns are
    the tensor cores' rows, 16 a warp is what their fewest are; more warps would unpack the same weights again.
    """
    c = c.with_variant("nested") if c.variant in PERSISTENT else c
    if linears == 1:
        return c
    block_n = max(LEAST_N, c.block_n // 2)
    warps = min(c.num_warps, block_n // 16) if c.variant == "columns" else c.num_warps
    return dataclasses.replace(c, block_n=block_n, num_warps=warps, tail=0)


def scaled_matmul_epilogue(
    x_q: Tensor, linears: list[Linear], rows: RowScale, epilogue: Epilogue, config: MatmulConfig | None = None
) -> None:
    """Fill the first linear's y, without a check; ``config`` is the tile of one linear of all columns."""
    (m, k), n = x_q.shape, linears[0].w.shape[0]
    if not m or not n:
        return

    def chosen(linears: list[Linear]) -> MatmulConfig:
        if len(linears) == 1:
            return written_out(tile_of(x_q, linears[0], n), epilogue)
        return choose(op_name(x_q, linears[0].w), m, len(linears) * n, k, x_q.device)

    if config is None and len(linears) == 2 and in_two(x_q, linears):
        gate_first(x_q, linears, rows, epilogue)
        return
    c = config or chosen(linears)
    given = c is config
    if c.variant == "unpack":
        linears = [linear._replace(w=unpack_weight(linear.w, k, bits=4, dtype=x_q.dtype)) for linear in linears]
        c = chosen(linears)
    if c.variant in BY_GLUON:
        BY_GLUON[c.variant](x_q, linears[0], rows, epilogue.gate, c, epilogue).run()
        return
    c = c if given else overlapped(c)
    by_tma = all(descriptor_reason(x_q, linear.w) is None for linear in linears)
    launch(x_q, linears, rows, c, epilogue, by_tma=by_tma).run()


def written_out(c: MatmulConfig, epilogue: Epilogue) -> MatmulConfig:
    """Weights that would stay packed are written out as codes where the results are codes: those tiles lie across y.

    Fc1 of Qwen2-VL's tower with quick GELU, 8,192 x 1280 x 5120 on an H200: 168 us from registers, 116 and what the writing takes
    from codes; with a Hadamard transform behind, which reads bf16, 150 from registers.
    """
    return c.with_variant("unpack") if c.variant == "registers" and epilogue.next is not None else c


def in_two(x_q: Tensor, linears: list[Linear]) -> bool:
    """Whether gate and up are two products: where each takes a tile of pingpong_matmul.py, by itself or written out as codes.

    Not where weights stay packed: their tiles lie across y, where threads read little of a gate at a time (505 us for 418 in two
    products and a pass over their results; 2,048 x 18,944 x 3,584 twice, H200).
    """
    m, n = len(x_q), linears[0].w.shape[0]
    if m <= WARPGROUP_ROWS or not has_warpgroup_products(x_q.device):
        return False
    return all(tile_of(x_q, linear, n).variant in ("pingpong", "unpack") for linear in linears)


def gate_first(
    x_q: Tensor, linears: list[Linear], rows: RowScale, epilogue: Epilogue, config: MatmulConfig | None = None
) -> None:
    """Gate and up one after the other: z_0 in the model's dtype, then f(z_0) in the epilogue of the second product."""
    gate, up = linears
    z = torch.empty(len(x_q), gate.w.shape[0], dtype=epilogue.dtype, device=x_q.device)
    scaled_matmul_epilogue(x_q, [gate._replace(y=z)], rows, Epilogue(dtype=epilogue.dtype), config)
    scaled_matmul_epilogue(x_q, [up], rows, epilogue._replace(gate=z), config)


def launch(
    x: Tensor, linears: list[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue, *, by_tma: bool,
    work: Workspace = workspace,
) -> Launch:
    """The launch for ``tile(c)``, c no "unpack"; ``by_tma``: whether TMA can address the operands."""
    c = tile(c, len(linears))
    by_tma = by_tma and c.variant in PERSISTENT
    c = c.with_stages(3) if c.variant in PERSISTENT and not by_tma else c
    if len(linears) == 1:
        if by_tma:
            return descriptor_launch(x, linears[0], rows, epilogue.gate, c, epilogue=epilogue)
        return pointer_launch(x, linears, rows, epilogue.gate, c, work=work, epilogue=epilogue)
    if by_tma:
        return _descriptor_launch(x, linears, rows, c, epilogue)
    return _pointer_launch(x, linears, rows, c, epilogue, work)


def _operands(linears: list[Linear], rows: RowScale, epilogue: Epilogue) -> dict[str, object]:
    (_, s0, b0, y), (_, s1, b1, _) = linears
    return dict(
        y_ptr=y, x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=s0, w_scale1_ptr=s1,
        bias_ptr=s0 if b0 is None else b0, bias1_ptr=s1 if b1 is None else b1, stride_y=y.stride(0), **epilogue.args(s0),
    )


def _pointer_launch(
    x: Tensor, linears: list[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue, work: Workspace
) -> Launch:
    (m, k), (w0, w1) = x.shape, (linear.w for linear in linears)
    (n, stored), packed = w0.shape, w0.dtype == torch.uint8
    tiles = ceil_div(m, c.block_m) * ceil_div(n, c.block_n)
    parts, counters = work(x.device, 2 * tiles, c.block_m * c.block_n, c.split_k, torch.int32)
    args = _operands(linears, rows, epilogue) | dict(
        x_ptr=x, w_ptr=w0, w1_ptr=w1, part_ptr=parts, counter_ptr=counters, M=m, N=n, K=k, STORED=stored,
        stride_x=x.stride(0), stride_w=w0.stride(0),
    )
    constants = dict(
        KIND=rows.kind, HAS_BIAS=linears[0].bias is not None, FACTOR=1 / 16 if packed else 1.0, PACKED=packed,
        COLUMNS=c.variant == "columns", EVEN_K=stored % c.block_k == 0 and not (packed and k % 2),
        PTX=has_inline_ptx(x.device), BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP_M=c.group_m,
        SPLIT=c.split_k > 1, **epilogue.constants(),
    )
    outputs = ("y_ptr", "part_ptr", "counter_ptr")
    return Launch(
        gated_matmul_kernel, (tiles, c.split_k), args, constants, outputs, c.num_warps, c.num_stages, c.block_m
    )


def _descriptor_launch(x: Tensor, linears: list[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue) -> Launch:
    (m, k), n = x.shape, linears[0].w.shape[0]
    programs = min(c.per_sm * multiprocessors(x.device), ceil_div(m, c.block_m) * ceil_div(n, c.block_n))
    args = _operands(linears, rows, epilogue) | dict(x_desc=x, w_desc=linears[0].w, w1_desc=linears[1].w, M=m, N=n, K=k)
    constants = dict(
        KIND=rows.kind, HAS_BIAS=linears[0].bias is not None, BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k,
        GROUP_M=c.group_m, PROGRAMS=programs, FLATTEN=c.variant == "descriptors", PTX=has_inline_ptx(x.device),
        **epilogue.constants(),
    )
    w_block = (c.block_n, c.block_k)
    blocks = {"x_desc": (c.block_m, c.block_k), "w_desc": w_block, "w1_desc": w_block}
    return Launch(gated_matmul_descriptor_kernel, (programs,), args, constants, ("y_ptr",), c.num_warps, c.num_stages, 0,
                  blocks)
