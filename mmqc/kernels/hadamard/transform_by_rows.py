"""Transforms of a number of rows that is known when they run: what the ops would launch of many (kernels/matmul/by_rows.py).

    transform       called by generated code for any number of rows, where there are many (lowering/rows_on_cuda.py)
    expect          called where that code is loaded: the kernels that may come are compiled, or loaded, meanwhile

The choice is the eager one, so a compiled graph gives what the ops give, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmqc.kernels.hadamard import hadamard_plan, hadamard_quantize, hadamard_wgmma
from mmqc.kernels.hadamard.hadamard_tiles import Kept, Written
from mmqc.kernels.shared import compile_ahead
from mmqc.kernels.shared.device_facts import WARPGROUP_ROWS
from mmqc.kernels.shared.launch import Launch, Shape
from mmqc.kernels.shared.repeated_launch import repeat
from mmqc.kernels.shared.row_scale import VISUAL, RowScale, row_scale
from mmqc.kernels.shared.split_k import Workspace

SAMPLE = (WARPGROUP_ROWS + 16, WARPGROUP_ROWS + 17)  # kernels that are compiled for a multiple of 16 differ


class Site(NamedTuple):
    """What the choice of launches depends on beside the rows.

    Attributes:
        n: width of a row of x.
        gated: whether x is a gate, and there is an up.
        code: dtype of y.
        bits: of the codes.
        kind: of the static scale (row_scale.py), or None.
        by_token: whether scales and offsets are found.
        kept: channels that are written beside codes, or 0.
    """

    n: int
    dtype: torch.dtype
    gated: bool
    code: torch.dtype
    bits: int
    kind: int | None
    by_token: bool
    kept: int = 0


def transform(
    site: tuple[Any, ...], x: Tensor, up: Tensor | None, y: Tensor, static: Tensor | None, visual: Tensor | None,
    scale: Tensor | None, offset: Tensor | None, channels: Tensor | None = None, some: Tensor | None = None,
) -> None:
    """Fill y [M, n], and where there are such scale and offset [M, 1] and some channels [M, r]; ``site``: of a ``Site``."""
    known, n = Site(*site), x.shape[1]
    wide, whole = hadamard_wgmma.matrices(n, x.device, x.dtype), hadamard_plan.hadamard_plan(n, x.device, x.dtype)

    def choose(new: Any, work: Workspace) -> Iterable[Launch]:
        m = x.shape[0]
        rows = None if static is None else row_scale(static, m, visual)
        kept = None if channels is None or some is None else Kept(channels, some)
        written = Written(y, rows, scale, offset, known.bits, kept)
        memory = lambda width, dtype: new((m, width), dtype, x.device)  # noqa: E731
        return hadamard_quantize.launches(x, up, written, whole, memory, by_warpgroups=True)

    given = (x, up, y, static, visual, scale, offset, channels, some, wide.outer, wide.inner, whole.outer, whole.inner)
    repeat((known, x.shape[0]), [t for t in given if t is not None], choose)


_expected: set[tuple[int, Site]] = set()


def expect(device: int, site: tuple[Any, ...]) -> None:
    """Begin to compile what calls may launch."""
    known = device, Site(*site)
    if known not in _expected:
        _expected.add(known)
        on = torch.device("cuda", device)
        compile_ahead.ahead(kernels_of(on, known[1]), on)


def kernels_of(device: torch.device, site: Site) -> Iterator[Launch]:
    """Every launch for the rows of SAMPLE, of ``Shape``s."""
    static, visual = Shape((2,), torch.float32, device), Shape((2,), torch.uint8, device)
    whole: Any = None  # kernels of many rows have other matrices
    for m in SAMPLE:
        x, y = (Shape((m, site.n), dtype, device) for dtype in (site.dtype, site.code))
        scale, offset = (Shape((m, 1), torch.float32, device) for _ in "so")
        by_row: Any = visual if site.kind == VISUAL.value else static
        rows: Any = None if site.kind is None else RowScale(site.kind, static, by_row)  # type: ignore[arg-type]
        found: Any = (scale, offset) if site.by_token else (None, None)
        some = Kept(Shape((site.kept,), torch.int64, device), Shape((m, site.kept), site.dtype, device))  # type: ignore[arg-type]
        written = Written(y, rows, *found, site.bits, some if site.kept else None)  # type: ignore[arg-type]
        memory = lambda width, dtype, m=m: Shape((m, width), dtype, device)  # noqa: E731
        given: Any = x
        yield from hadamard_quantize.launches(given, given if site.gated else None, written, whole, memory, by_warpgroups=True)
