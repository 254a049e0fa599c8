"""Kernel launches inside a compiled graph: the launchers of ``kernels/``, given buffers that do not exist yet.

    Operand     a tensor of the graph, with what a launcher asks of one
    regimes     rows to choose a tile for, and when that tile's launch is to run
    emit        a launch in the generated code

Why:     a launch in the generated code does without the checks and choices that a call of a Python op makes each time, and a
         package compiled ahead of time has no Python.  A graph whose number of rows is symbolic holds one launch for each
         regime of rows; the one that is meant runs (in a package, the others have an empty grid).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from sympy import Integer, Max, Min

from mmqc.kernels.matmul.product import Caller, Product
from mmqc.kernels.shared.device_facts import ceil_div
from mmqc.kernels.shared.launch import Launch, Shape
from mmqc.lowering.early_kernels import starts_early
from mmqc.lowering.inductor import (
    FloorDiv,
    TensorBox,
    as_int,
    at_least,
    at_most,
    contiguous,
    counters,
    empty,
    for_package,
    launch_kernel,
    lowerings,
    size_hint,
    static_int,
)

aten = torch.ops.aten
REGIMES = (16, 64, 256)  # bounds of regimes of rows
MANY = 2048  # rows of the last regime, if nothing is known of them
COUNTERS = 1 << 16


class Operand(Shape):
    """A tensor of the graph in row-major order; its sizes are ints, but for the first one of a ``matrix`` or a ``vector``."""

    def __init__(self, box: TensorBox, *, symbolic: bool = False) -> None:
        self.box: Any = contiguous(box)
        first, *rest = self.box.get_size() or [1]
        shape = (as_int(first) if symbolic else static_int(first), *map(static_int, rest))
        super().__init__(shape, self.box.get_dtype(), self.box.get_device_or_error())

    @classmethod
    def matrix(cls, box: TensorBox) -> Operand:
        """[..., K] as rows."""
        size = list(box.get_size())
        return cls(lowerings[aten.view.default](box, [math.prod(size[:-1]), size[-1]]), symbolic=True)

    @classmethod
    def vector(cls, box: TensorBox) -> Operand:
        """[...] as one axis."""
        return cls(lowerings[aten.view.default](box, [math.prod(box.get_size())]), symbolic=True)

    @classmethod
    def sized(cls, box: TensorBox) -> Operand:
        """Any of its sizes may be a symbol."""
        found = cls.__new__(cls)
        found.box = contiguous(box)
        Shape.__init__(found, tuple(map(as_int, found.box.get_size())), found.box.get_dtype(), found.box.get_device_or_error())
        return found

    @classmethod
    def new(cls, shape: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Operand:
        """Memory that a kernel fills."""
        return cls(empty(shape, dtype, device), symbolic=True)


def workspace(device: torch.device, tiles: int, tile_elements: int, split: int, dtype: torch.dtype) -> tuple[Operand, Operand]:
    """As in kernels/split_k.py; the launches of a graph share their counters, for each of them leaves zeros."""
    count = Operand(counters(max(COUNTERS, tiles) if split > 1 else COUNTERS, device))
    return (Operand.new((split * tiles * tile_elements,), dtype, device), count) if split > 1 else (count, count)


def count_rows(x: TensorBox) -> Any:
    """M of [..., K], an int if it is known."""
    return as_int(math.prod(x.get_size()[:-1]))


def matmul_caller(rows: Any, runs: Any = None) -> Caller:
    """A graph as the plans of the matmul kernels know it: it may call an op on Hopper, of a number of rows that is known."""
    return Caller(gluon=isinstance(rows, int) and not for_package(), always=runs is None, graph=True)


def shape_of(box: TensorBox) -> Any:
    """A weight, a scale or a bias, as far as a plan depends on it."""
    return Shape(tuple(map(static_int, box.get_size())), box.get_dtype(), box.get_device_or_error())


def rows_of(x: TensorBox) -> Any:
    """X [..., K] as rows, as far as a plan depends on it."""
    return Shape((count_rows(x), static_int(x.get_size()[-1])), x.get_dtype(), x.get_device_or_error())


def regimes(rows: Any, up_to: int | None = None) -> Iterator[tuple[int, Any]]:
    """(Rows to choose a tile for; 1 where the number of rows is of this regime, else 0, or None where it always is).

    ``up_to``: more rows than that are not for launches of the graph.
    """
    if isinstance(rows, int):
        yield rows, None
        return
    above = 0
    for last in bounds() if up_to is None else (*(last for last in bounds() if last < up_to), up_to):
        if at_most(rows, last):
            yield last, (_from(rows, above) if above and not _certainly(rows, above + 1) else None)
            return
        if not _certainly(rows, last + 1):
            yield last, _from(rows, above) * no_more_than(rows, last)
            above = last
    if up_to is None:
        yield max(size_hint(rows, MANY), MANY), (_from(rows, above) if above else None)


def _certainly(rows: Any, least: int) -> bool:
    """Whether there are at least so many rows; a trace takes two for the least number, and a step has one."""
    return at_least(rows, least) and not (least == 2 and for_step())


def bounds() -> tuple[int, ...]:
    """The last row of each regime but the last one."""
    return (1, *REGIMES) if for_step() else REGIMES


def for_step() -> bool:
    """Whether the code is a package's step of decoding: of any number of rows, and of one most of the time."""
    return for_package() and starts_early()


def expected(rows: Any) -> int:
    """The rows that a plan for any number of them is made for: in a step the example's, else many, for its prompt may be short."""
    hint = size_hint(rows, MANY)
    return hint if for_step() else max(MANY, hint)


def of_any_rows(products: Sequence[Product], rows: Any, planned: int, up_to: int | None = None) -> list[Product]:
    """The products of a regime of ``regimes``, for all the rows that it may have.

    Where these are more than ``planned``, no sum is split over programs, whose parts would have memory for ``planned`` rows.
    """
    bounded = isinstance(rows, int) or planned in (*bounds(), up_to) or at_most(rows, planned)
    return [product if bounded else product._replace(tile=product.tile.unsplit()) for product in products]


def more_than(rows: Any, bound: int) -> Any:
    """1 where there are more rows, else 0; None where there always are."""
    return None if at_least(rows, bound + 1) else _from(rows, bound)


def no_more_than(rows: Any, bound: int) -> Any:
    """1 where there are at most so many rows, else 0; None where there always are."""
    return None if at_most(rows, bound) else Min(1, Max(0, bound + 1 - rows))


def box_of(operand: Any) -> Any:
    """An operand's box, if there is an operand."""
    return None if operand is None else operand.box


def _from(rows: Any, above: int) -> Any:
    return Min(1, Max(0, rows - above))


def emit(launch: Launch, rows: Any, planned: int, runs: Any = None) -> None:
    """Put a launch that was made for ``planned`` rows into the graph, for ``rows`` of them, where ``runs`` is not 0."""
    first, *more = launch.grid
    args = {name: value.box if isinstance(value, Operand) else value for name, value in launch.args.items()}
    if "M" in args:
        args["M"] = rows
    if launch.block_rows and not isinstance(rows, int):
        first = -FloorDiv(-rows, Integer(launch.block_rows)) * (first // ceil_div(planned, launch.block_rows))
    if runs is not None:
        first = first * runs
    launch_kernel(launch, (first, *more, *[1] * (2 - len(more))), args, runs)


def emit_all(launches: Iterable[Launch], rows: Any, planned: int, runs: Any = None) -> None:
    """Each of them."""
    for launch in launches:
        emit(launch, rows, planned, runs)
