"""The quantized linear with an activation, a gate and the next quantization in its epilogue (ops/scaled_matmul_epilogue.py).

    one linear      scaled_matmul's kernels, whose epilogue goes on
    gate and up     gated_matmul_tiles.py, or on Hopper packed_gated.py and pingpong_gated.py: both tiles in one program;  or, of
                    many rows and weights that stay packed, both are written, and a pass follows (gated_rows.py)

Shapes:  those of scaled_matmul.py, int8 x_q; y [M, N] in z's dtype, or int8
Bytes:   y is written once: 1 byte an entry for codes, where the unfused form moves 5 (z out, z in, codes out), with a gate 9.
Cost:    the arithmetic of f and of the rounding runs in the epilogue, where the tensor cores of that program wait: some twenty
         instructions an entry.  Above K of about a thousand the bytes saved are worth more (docs/explanation/epilogues.md).
Arch:    as scaled_matmul.py.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmqc.kernels.matmul import configs, gated_rows, scaled_matmul
from mmqc.kernels.matmul.configs import PERSISTENT, MatmulConfig
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.gated_matmul_tiles import gated_matmul_descriptor_kernel, gated_matmul_kernel
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.product import ANY_ROWS, EAGER, Caller, New, Product, kernel_of, new_tensor, why_not_tma
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS, ceil_div, has_inline_ptx, has_warpgroup_products, multiprocessors
from mmqc.kernels.shared.early_start import early_lines
from mmqc.kernels.shared.launch import Launch, Shape
from mmqc.kernels.shared.row_scale import RowScale
from mmqc.kernels.shared.split_k import Workspace, workspace
from mmqc.kernels.warpgroup import packed_gated, pingpong_gated, pingpong_matmul

LEAST_N = 16  # of a tile


def overlapped(c: MatmulConfig) -> MatmulConfig:
    """A persistent tile with two programs a multiprocessor: while one is in its epilogue, the other multiplies."""
    if c.variant not in PERSISTENT or c.per_sm > 1 or c.block_m * c.block_n <= 128 * 128:
        return c
    return dataclasses.replace(c, block_m=128, block_n=128, num_warps=4, num_stages=3, per_sm=2, tail=0)


def with_epilogue(c: MatmulConfig, linears: int) -> MatmulConfig:
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
    x_q: Tensor, linears: Sequence[Linear], rows: RowScale, epilogue: Epilogue, config: MatmulConfig | None = None
) -> None:
    """Fill the first linear's y, without a check; ``config`` is the tile of one linear of all columns."""
    products = plan(x_q, linears, epilogue.dtype, config=config)
    for launch in launches(x_q, linears, rows, epilogue, products):
        launch.run()


def plan(
    x: Tensor, linears: Sequence[Linear], dtype: torch.dtype, caller: Caller = EAGER, *,
    config: MatmulConfig | None = None,
) -> list[Product]:
    """One product; or the gate's, up's and a pass behind both.  z is in ``dtype``."""
    if not x.shape[0] or not linears[0].w.shape[0]:
        return []
    if config is None and len(linears) == 2 and stay_packed(x, linears, caller):
        return plan_packed(x, linears, dtype, caller)
    if config is None and len(linears) == 2 and are_pingpong(x, linears, caller):
        tile = pingpong_gated.tile(x.shape[0], linears[0].w.shape[0], linears[0].y.dtype.itemsize)
        return [Product("gated pingpong", tile, (0, 1), linears[0].w.dtype == torch.uint8)]
    c = config or chosen(x, linears, caller)
    written_out, everyone = c.variant == "unpack" and caller.always, tuple(range(len(linears)))
    if written_out:
        linears = [scaled_matmul.as_codes(x, linear) for linear in linears]
        c = chosen(x, linears, caller)
    if c.variant in scaled_matmul.GLUON:
        return [Product(c.variant if len(linears) == 1 else f"gated {c.variant}", c, everyone, written_out)]
    c = ANY_ROWS if c.variant == "unpack" else c if config is not None else overlapped(c)
    by_tma = all(why_not_tma(x, linear.w) is None for linear in linears)
    return [Product(*kernel_of(with_epilogue(c, len(linears)), by_tma), everyone, written_out)]


def plan_packed(x: Tensor, linears: Sequence[Linear], dtype: torch.dtype, caller: Caller = EAGER) -> list[Product]:
    """One launch of a few dozen rows; of more the products of both, and a pass over what they have written."""
    if packed_gated.takes(x.shape[0]):
        return [Product("gated", packed_gated.tile(x.shape[0]), (0, 1))]
    written = [linear._replace(y=Shape((x.shape[0], linear.w.shape[0]), dtype, x.device)) for linear in linears]
    return [*scaled_matmul.plan(x, written, caller), Product("pass", ANY_ROWS, (0, 1))]


def chosen(x: Tensor, linears: Sequence[Linear], caller: Caller) -> MatmulConfig:
    """The tile of one linear that has the columns of all.

    Weights that would stay packed are written out as codes where the results of many rows are codes: those tiles lie across y.
    Fc1 of Qwen2-VL's tower with quick GELU, 8,192 x 1280 x 5120 on an H200: 168 us from registers, 116 and what the writing takes
    from codes; with a Hadamard transform behind, which reads bf16, 150 from registers.
    """
    (m, k), n = x.shape, linears[0].w.shape[0]
    if len(linears) == 1:
        c = scaled_matmul.tile_of(x, linears[0], n, caller)
        written_out = c.variant == "registers" and linears[0].y.dtype == torch.int8 and m > WARPGROUP_ROWS
        return c.with_variant("unpack") if written_out else c
    op = scaled_matmul.op_name(x.dtype, linears[0].w.dtype)
    return configs.config(op, m, len(linears) * n, k, x.device)


def are_pingpong(x: Tensor, linears: Sequence[Linear], caller: Caller = EAGER) -> bool:
    """Whether gate and up are pingpong_gated.py's: many rows, of codes, or of weights that each by itself would be written out."""
    if x.shape[0] <= WARPGROUP_ROWS or x.dtype != torch.int8 or not has_warpgroup_products(x.device) or not caller.gluon:
        return False
    if {tile.variant for tile in _tiles(x, linears, caller)} - {"pingpong"} - ({"unpack"} if caller.always else set()):
        return False
    as_codes = [linear if linear.w.dtype == x.dtype else scaled_matmul.as_codes(x, linear) for linear in linears]
    return all(pingpong_matmul.why_not(x, linear.w, linears[0].y) is None for linear in as_codes)


def stay_packed(x: Tensor, linears: Sequence[Linear], caller: Caller = EAGER) -> bool:
    """Whether gate and up are multiplied from packed weights, unpacked in registers."""
    return caller.gluon and {tile.variant for tile in _tiles(x, linears, caller)} == {"registers"}


def are_better_apart(x: Tensor, linears: Sequence[Linear]) -> bool:
    """Whether a graph has gate, up and what follows as operations of their own, among which generated code fuses the latter."""
    return len(linears) == 2 and stay_packed(x, linears) and not packed_gated.takes(x.shape[0])


def _tiles(x: Tensor, linears: Sequence[Linear], caller: Caller) -> list[MatmulConfig]:
    return [scaled_matmul.tile_of(x, linear, linear.w.shape[0], caller) for linear in linears]


def launches(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, epilogue: Epilogue, products: Sequence[Product], *,
    new: New = new_tensor, work: Workspace = workspace,
) -> Iterator[Launch]:
    """Fill the first linear's y."""
    if not products:
        return
    if products[-1].kernel == "pass":
        z = [new((x.shape[0], linear.w.shape[0]), epilogue.dtype, x.device) for linear in linears]
        written = [linear._replace(y=of) for linear, of in zip(linears, z, strict=True)]
        yield from scaled_matmul.launches(x, written, rows, products[:-1], new=new, work=work)
        yield gated_rows.launch(*z, linears[0].y, epilogue)
        return
    [product] = products
    if product.written_out:
        linears = yield from scaled_matmul.writing_out(x, linears, new)
    yield launch(x, linears, rows, product, epilogue, work)


def launch(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, product: Product, epilogue: Epilogue, work: Workspace
) -> Launch:
    """The launch of a product, of linears whose weights are written out where it says so."""
    if len(linears) == 1:
        return scaled_matmul.launch(x, linears, rows, product, epilogue, work)
    if product.kernel == "gated pingpong":
        return pingpong_gated.launch(x, linears, rows, product.tile, epilogue, work)
    if product.kernel == "gated":
        return packed_gated.launch(x, linears, rows, product.tile, epilogue, work)
    if product.kernel == "descriptors":
        return _descriptor_launch(x, linears, rows, product.tile, epilogue)
    return _pointer_launch(x, linears, rows, product.tile, epilogue, work)


def _operands(linears: Sequence[Linear], rows: RowScale, epilogue: Epilogue) -> dict[str, object]:
    (_, s0, b0, y, _), (_, s1, b1, _, _) = linears
    return dict(
        y_ptr=y, x_scale_ptr=rows.scale, row_ptr=rows.rows, w_scale_ptr=s0, w_scale1_ptr=s1,
        bias_ptr=s0 if b0 is None else b0, bias1_ptr=s1 if b1 is None else b1, stride_y=y.stride(0), **epilogue.args(s0),
    )


def _pointer_launch(
    x: Tensor, linears: Sequence[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue, work: Workspace
) -> Launch:
    (m, k), (w0, w1) = x.shape, (linear.w for linear in linears)
    (n, stored), packed = w0.shape, w0.dtype == torch.uint8
    tiles = ceil_div(m, c.block_m) * ceil_div(n, c.block_n)
    parts, counters = work(x.device, 2 * tiles, c.block_m * c.block_n, c.split_k, torch.int32)
    args = _operands(linears, rows, epilogue) | dict(
        x_ptr=x, w_ptr=w0, w1_ptr=w1, part_ptr=parts, counter_ptr=counters, M=m, N=n, K=k, STORED=stored,
        stride_x=x.stride(0), stride_w=w0.stride(0),
    )
    lines = early_lines(x.device, c.block_m)
    constants = dict(
        KIND=rows.kind, HAS_BIAS=linears[0].bias is not None, FACTOR=1 / 16 if packed else 1.0, PACKED=packed,
        COLUMNS=c.variant == "columns", EVEN_K=stored % c.block_k == 0 and not (packed and k % 2),
        PTX=has_inline_ptx(x.device), BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP_M=c.group_m,
        SPLIT=c.split_k > 1, **epilogue.constants(), LINES=lines,
    )
    outputs = ("y_ptr", "part_ptr", "counter_ptr")
    return Launch(
        gated_matmul_kernel, (tiles, c.split_k), args, constants, outputs, c.num_warps, c.num_stages, c.block_m,
        early=lines > 0,
    )


def _descriptor_launch(x: Tensor, linears: Sequence[Linear], rows: RowScale, c: MatmulConfig, epilogue: Epilogue) -> Launch:
    (m, k), n = x.shape, linears[0].w.shape[0]
    programs = c.per_sm * multiprocessors(x.device)
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
