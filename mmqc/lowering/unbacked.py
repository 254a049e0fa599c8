"""Sizes that only data says, where Inductor fails.

    a slice up to one, of a view of what is not in memory yet      Inductor takes strides that such a view does not have
                                                                   here the value is computed, and sliced where it lies
    a convolution of so many images                                Inductor stores channels last what is traced as contiguous
                                                                   here layouts stay as they are traced
    rows up to one that are written to                             Inductor cannot say which rows these are, and forgets that a view
                                                                   of them has a size of its own
                                                                   here a row is compared with both bounds
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

import sympy
import torch
from torch import Tensor, fx
from torch._inductor.fx_passes import reinplace
from torch._inductor.ir import BaseView, ExternKernel, Pointwise, ReinterpretView, TensorBox
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv, compute_unbacked_bindings, free_unbacked_symbols
from torch.utils._sympy.functions import Max, Min, Where

CONVERT: Any = torch.ops.prims.convert_element_type.default
SCATTER: Any = torch.ops.aten.slice_scatter.default
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
def written_slices() -> Iterator[None]:
    """Until the end of the block rows between such bounds can be written to: where a row is between them, it is the new one."""
    theirs, make = lowerings[SCATTER], reinplace.graph_call_function

    def lower(x: TensorBox, src: TensorBox, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        if step != 1 or not any(free_unbacked_symbols(bound) for bound in (start, end) if bound is not None):
            return theirs(x, src, dim, start, end, step)
        dim, size = dim % len(x.get_size()), x.get_size()[dim]
        first = _clamped(start, size) if start is not None else sympy.S.Zero
        behind = _clamped(end, size) if end is not None else size
        old, new = x.make_loader(), lowerings[CONVERT](src, x.get_dtype()).make_loader()

        def row(index: Any) -> Any:
            place = ops.index_expr(index[dim], torch.int64)
            bounds = [ops.index_expr(bound, torch.int64) for bound in (first, behind)]
            inside = ops.and_(ops.ge(place, bounds[0]), ops.lt(place, bounds[1]))
            moved = [*index[:dim], index[dim] - first, *index[dim + 1 :]]
            return ops.where(inside, ops.masked(inside, lambda: new(moved), 0), old(index))

        return Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=row, ranges=list(x.get_size()))

    def call(graph: fx.Graph, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A view that a pass of Inductor makes says which sizes come with it."""
        node = make(graph, function, *args, **kwargs)
        value = node.meta["val"]
        sizes = value.fake_mode.shape_env if isinstance(value, FakeTensor) else None
        if sizes is not None and (found := compute_unbacked_bindings(sizes, value)):
            node.meta["unbacked_bindings"] = found
        return node

    with mock.patch.dict(lowerings, {SCATTER: lower}), mock.patch.object(reinplace, "graph_call_function", call):
        yield


def _clamped(bound: Any, size: Any) -> Any:
    """A bound of a slice as a place from nought to the size; one below nought counts from the end."""
    bound = sympy.sympify(bound)
    return Max(0, Min(size, Where(sympy.Lt(bound, 0), bound + size, bound)))


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
