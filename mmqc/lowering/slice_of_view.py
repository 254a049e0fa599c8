"""A slice up to where only data says, of a tensor that is a view of what is not in memory yet.

    Inductor      takes a view's strides, which a view of a computed value does not have: NotImplementedError
    here          the value is computed, and sliced where it lies

Where:   the images of a padded batch, each up to its own number of patches (LFM2-VL's towers, behind a norm).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._inductor.ir import BaseView, ExternKernel, ReinterpretView, TensorBox
from torch._inductor.lowering import lowerings
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

SLICE: Any = torch.ops.aten.slice.Tensor


@contextmanager
def slices_of_views() -> Iterator[None]:
    """Until the end of the block such slices are lowered so."""
    theirs = lowerings[SLICE]

    def lower(x: TensorBox, dim: int = 0, start: Any = 0, end: Any = None, *more: Any, **kwargs: Any) -> Any:
        view = isinstance(x, TensorBox) and isinstance(x.data, BaseView) and not isinstance(x.data, ReinterpretView)
        if view and any(free_unbacked_symbols(bound) for bound in (start, end) if bound is not None):
            x = TensorBox(ExternKernel.realize_input(x))
        return theirs(x, dim, start, end, *more, **kwargs)

    with mock.patch.dict(lowerings, {SLICE: lower}):
        yield
