"""Linears of a number of rows that is known when they run: what the ops would launch, without the way through PyTorch's dispatcher.

    scaled, with_epilogue,
    weight_only               called by generated code for any number of rows, where there are more than a few (lowering/by_rows.py)
    expect, expect_bytes      called where that code is loaded: the kernels that may come are compiled, or loaded, meanwhile

The choice is the eager one (``plan``), so a compiled graph gives what the ops give, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmqc.kernels.matmul import group_scaled_matmul as group_kernel
from mmqc.kernels.matmul import scaled_matmul_epilogue as epilogue_kernel
from mmqc.kernels.matmul import weight_only_matmul as weight_only_kernel
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.shared import compile_ahead
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS, ceil_div
from mmqc.kernels.shared.launch import Launch, Shape
from mmqc.kernels.shared.repeated_launch import repeat
from mmqc.kernels.shared.row_scale import VISUAL, RowScale, row_scale
from mmqc.kernels.shared.split_k import Workspace

# Rows that stand for all: tiles have 64 of them or 128, those of more than 8,192 differ in their last round alone, and kernels that
# are compiled for a multiple of 16 differ by the tuned number of rows.
SAMPLE = (*range(WARPGROUP_ROWS + 64, 8193, 64), *range(8192 + 128, 16385, 128), 1023, 2047, 4095, 8191, 16383)
SAMPLE_PACKED = (32, 64, 128, 256, 512)  # below those, of packed weights
SAMPLE_GROUPS = (320, 384, 448, 512)  # and of scales of groups
SAMPLE_BYTES = (32, 64, 128, 256)  # of all that come there


def scaled(
    site: str, x: Tensor, x_scale: Tensor, visual: Tensor | None, w: Sequence[Tensor], w_scale: Sequence[Tensor],
    bias: Sequence[Tensor | None], y: Sequence[Tensor], groups: Sequence[Tensor | None], group_size: int,
) -> None:
    """Fill every y; ``site`` says everything that the choice depends on, but for the rows of x [M, K]."""

    def choose(new: Any, work: Workspace) -> Iterable[Launch]:
        linears = [Linear(*parts) for parts in zip(w, w_scale, bias, y, groups, strict=True)]
        rows, products = row_scale(x_scale, x.shape[0], visual), group_kernel.plan(x, linears, group_size)
        return group_kernel.launches(x, linears, rows, group_size, products, new=new, work=work)

    repeat((site, x.shape[0]), _present(x, x_scale, visual, *w, *w_scale, *bias, *y, *groups), choose)


def with_epilogue(
    site: str, x: Tensor, x_scale: Tensor, visual: Tensor | None, w: Sequence[Tensor], w_scale: Sequence[Tensor],
    bias: Sequence[Tensor | None], y: Tensor, activation: str, dtype: torch.dtype, next_scale: Tensor | None,
    next_visual: Tensor | None, next_bits: int, low_x: Tensor | None, low_w: Tensor | None,
) -> None:
    """Fill y."""

    def choose(new: Any, work: Workspace) -> Iterable[Launch]:
        m = x.shape[0]
        codes = None if next_scale is None else row_scale(next_scale, m, next_visual)
        low = None if low_x is None or low_w is None else (low_x, low_w)
        epilogue = Epilogue(activation, dtype, codes, next_bits, low)
        linears = [Linear(*parts, y) for parts in zip(w, w_scale, bias, strict=True)]
        products = epilogue_kernel.plan(x, linears, dtype)
        rows = row_scale(x_scale, m, visual)
        return epilogue_kernel.launches(x, linears, rows, epilogue, products, new=new, work=work)

    operands = _present(x, x_scale, visual, *w, *w_scale, *bias, y, next_scale, next_visual, low_x, low_w)
    repeat((site, x.shape[0]), operands, choose)


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def weight_only(
    site: str, x: Tensor, w: Sequence[Tensor], w_scale: Sequence[Tensor], bias: Sequence[Tensor | None], y: Sequence[Tensor]
) -> None:
    """Fill every y of bytes with a scale a row; byte_matmul.py takes so many rows."""

    def choose(new: Any, work: Workspace) -> Iterable[Launch]:
        linears = [Linear(*parts) for parts in zip(w, w_scale, bias, y, strict=True)]
        for product in weight_only_kernel.plan(x, linears, 8):
            yield weight_only_kernel.launch_of(product, x, [linears[i] for i in product.linears], None, 0, 8, work)

    repeat((site, x.shape[0]), _present(x, *w, *w_scale, *bias, *y), choose)


class Part(NamedTuple):
    """A linear of a call, as far as its kernels depend on it: w [N, stored], and the dtypes of w, bias and y."""

    n: int
    stored: int
    w: torch.dtype
    bias: torch.dtype | None
    y: torch.dtype


class After(NamedTuple):
    """An epilogue, likewise.

    Attributes:
        activation, dtype, bits: those of ``Epilogue``.
        codes: the kind of scale of the codes that it ends in.
        rank, low_x, low_w: of the term of low rank, and the dtypes of its factors; 0 without one.
    """

    activation: str
    dtype: torch.dtype
    codes: int | None
    bits: int
    rank: int = 0
    low_x: torch.dtype | None = None
    low_w: torch.dtype | None = None


class Groups(NamedTuple):
    """Scales of groups, likewise: the dtype of integer ones, and a group's channels."""

    integer: torch.dtype | None
    size: int


def expect(
    device: int, x: tuple[torch.dtype, int], scale: int, parts: Sequence[Part], after: After | None = None,
    groups: Groups | None = None,
) -> None:
    """Begin to compile what calls with x [*, K] of a dtype, with a kind of scale, may launch."""
    _expect_once(device, kernels_of, x, scale, tuple(parts), after, groups)


_expected: set[tuple[Any, ...]] = set()


def expect_bytes(device: int, x: tuple[torch.dtype, int], parts: Sequence[Part], scale: torch.dtype) -> None:
    """The same for ``weight_only``."""
    _expect_once(device, byte_kernels_of, x, tuple(parts), scale)


def _expect_once(device: int, launches: Callable[..., Iterator[Launch]], *args: Any) -> None:
    known = device, launches, *args
    if known not in _expected:
        _expected.add(known)
        on = torch.device("cuda", device)
        compile_ahead.ahead(launches(on, *args), on)


def byte_kernels_of(
    device: torch.device, x: tuple[torch.dtype, int], parts: Sequence[Part], scale: torch.dtype
) -> Iterator[Launch]:
    """Every launch for the rows of SAMPLE_BYTES, of ``Shape``s."""
    for m in SAMPLE_BYTES:
        given: Any = Shape((m, x[1]), x[0], device)
        some = [linear_of(part, m, device, scale) for part in parts]
        for product in weight_only_kernel.plan(given, some, 8):
            linears = [some[i] for i in product.linears]
            yield weight_only_kernel.launch_of(product, given, linears, None, 0, 8, shapes_of)


def kernels_of(
    device: torch.device, x: tuple[torch.dtype, int], scale: int, parts: Sequence[Part], after: After | None,
    groups: Groups | None = None,
) -> Iterator[Launch]:
    """Every launch for the rows of SAMPLE, and of SAMPLE_PACKED or SAMPLE_GROUPS where those may come, of ``Shape``s."""
    (dtype, k), scales = x, _scales(scale, device)
    codes = None if after is None or after.codes is None else _scales(after.codes, device)
    packed = all(part.w == torch.uint8 for part in parts) and dtype == torch.int8
    for m in (*(SAMPLE_GROUPS if groups else SAMPLE_PACKED if packed else ()), *SAMPLE):
        given: Any = Shape((m, k), dtype, device)
        some = [_with_groups(linear_of(part, m, device), k, groups) for part in parts]
        if after is None:
            size = groups.size if groups else 0
            products = group_kernel.plan(given, some, size)
            yield from group_kernel.launches(given, some, scales, size, products, new=shape_of, work=shapes_of)
        else:
            low = _term(after, m, parts[0].n, device)
            epilogue = Epilogue(after.activation, after.dtype, codes, after.bits, low)
            products = epilogue_kernel.plan(given, some, epilogue.dtype)
            yield from epilogue_kernel.launches(given, some, scales, epilogue, products, new=shape_of, work=shapes_of)


def _with_groups(linear: Any, k: int, groups: Groups | None) -> Any:
    if groups is None:
        return linear
    scales = Shape((linear.w.shape[0], ceil_div(k, groups.size)), groups.integer or torch.float32, linear.w.device)
    return linear._replace(scale=scales) if groups.integer is None else linear._replace(group_scale=scales)


def _scales(kind: int, device: torch.device) -> Any:
    scale = Shape((2,), torch.float32, device)
    return RowScale(kind, scale, Shape((2,), torch.uint8, device) if kind == VISUAL.value else scale)  # type: ignore[arg-type]


def _term(after: After, m: int, n: int, device: torch.device) -> tuple[Any, Any] | None:
    if after.low_x is None or after.low_w is None:
        return None
    return Shape((m, after.rank), after.low_x, device), Shape((n, after.rank), after.low_w, device)


def linear_of(part: Part, m: int, device: torch.device, scale_dtype: torch.dtype = torch.float32) -> Any:
    """A linear of ``Shape``s."""
    bias = None if part.bias is None else Shape((part.n,), part.bias, device)
    w, scale = Shape((part.n, part.stored), part.w, device), Shape((part.n,), scale_dtype, device)
    return Linear(w, scale, bias, Shape((m, part.n), part.y, device))  # type: ignore[arg-type]


def shape_of(shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """In a new tensor's place."""
    return Shape(shape, dtype, device)


def shapes_of(
    device: torch.device, tiles: int, tile_elements: int, split: int, dtype: torch.dtype, added: bool = False
) -> tuple[Any, Any]:
    """In the place of ``workspace``'s."""
    parts = Shape((split * tiles * tile_elements,), dtype, device)
    return parts, Shape((tiles,), torch.int32, device)
