"""Sizes that only data says, where Inductor fails.

    a slice up to one, of a view of what is not in memory yet      Inductor takes strides that such a view does not have
                                                                   here the value is computed, and sliced where it lies
    a convolution of so many images                                Inductor stores channels last what is traced as contiguous
                                                                   here layouts stay as they are traced
    a node that is looked at again, with a size that is another    Inductor renames the size to a new one, and refuses if it was
                                                                   known to be equal to one; here the new one is equal to it, too

Where:   the images of a padded batch: each up to its own number of patches behind a norm (LFM2-VL), those that are no padding
         (Idefics2); the visual tokens of a prompt, counted by two masks (Qwen3-VL).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor.ir import BaseView, ExternKernel, ReinterpretView, TensorBox
from torch._inductor.lowering import lowerings
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

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


def layouts(gm: fx.GraphModule) -> dict[str, Any]:
    """Inductor's options for a graph with such convolutions."""
    convolutions = (node for node in gm.graph.nodes if node.op == "call_function" and re.search("conv(?!ert)", str(node.target)))
    found = (node.meta.get("example_value", node.meta.get("val")) for node in convolutions)
    return {"layout_optimization": False} if any(isinstance(x, Tensor) and free_unbacked_symbols(x) for x in found) else {}


@contextmanager
def renamed_again() -> Iterator[None]:
    """Until the end of the block a size that equals another may be renamed."""
    theirs: Any = ShapeEnv._rename_unbacked_to

    def rename(self: ShapeEnv, old: Any, new: Any) -> None:
        equal = self.replacements.get(old)
        if equal is None or not free_unbacked_symbols(equal):
            theirs(self, old, new)
        else:
            self._set_replacement(new, equal, "rename_unbacked_to")

    with mock.patch.object(ShapeEnv, "_rename_unbacked_to", rename):
        yield
