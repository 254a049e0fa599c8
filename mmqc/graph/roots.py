"""A size that a model takes the root of is a constant of the trace, and so are the sizes that it is computed from.

    height = width = int(patches ** 0.5)        patches = (H // 14) (W // 14)

Why:     such a model takes its images for squares of the size that it was made for (InternVL).  With a symbol for each side all
         that follows is made of roots and roundings of floats, in which torch (2.11 to 2.13) fails (``size % 0.5``), or which it
         simplifies for minutes.
Not:     sizes that only data says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

POWER, ROOT = "__pow__", "__sym_sqrt__"  # a size is made a float before ``math.sqrt`` takes it


@contextmanager
def roots_are_constants() -> Iterator[None]:
    """Until the end of the block."""
    power, root = getattr(torch.SymInt, POWER), getattr(torch.SymFloat, ROOT)

    def raised(size: torch.SymInt, exponent: Any) -> Any:
        whole = not isinstance(exponent, float) or exponent.is_integer()
        return power(size, exponent) if whole or free_unbacked_symbols(size) else int(settled(size)) ** exponent

    def rooted(size: torch.SymFloat) -> Any:
        return root(size) if free_unbacked_symbols(size) else float(settled(size)) ** 0.5

    with mock.patch.object(torch.SymInt, POWER, raised), mock.patch.object(torch.SymFloat, ROOT, rooted):
        yield


def settled(size: Any) -> Any:
    """The same, with a guard on the value of each of its symbols."""
    for symbol in sorted(size.node.expr.free_symbols, key=str):
        int(size.node.shape_env.create_symintnode(symbol, hint=None))
    return size
