"""Sizes that only data says, where Inductor fails.

    a slice up to one, of a view of what is not in memory yet      Inductor takes strides that such a view does not have
                                                                   here the value is computed, and sliced where it lies
    a convolution of so many images                                Inductor stores channels last what is traced as contiguous
                                                                   here layouts stay as they are traced

Where:   the images of a padded batch: each up to its own number of patches behind a norm (LFM2-VL), those that are no padding
         (Idefics2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
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


def layouts(gm: fx.GraphModule) -> dict[str, Any]:
    """Inductor's options for a graph with such convolutions."""
    convolutions = (node for node in gm.graph.nodes if node.op == "call_function" and "conv" in str(node.target))
    found = (node.meta.get("example_value", node.meta.get("val")) for node in convolutions)
    return {"layout_optimization": False} if any(isinstance(x, Tensor) and free_unbacked_symbols(x) for x in found) else {}
