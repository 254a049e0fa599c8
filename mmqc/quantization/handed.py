"""Where the exact rewrites changed the values themselves: in what modules are given, in what they give, and in their children's.

Data flow tells from which modules a changed space is seen (graph/spaces/frames.py), by the weights on which it lies.  Between
two norms, or behind operations that only a pass makes a norm of, it may lie on none; so the values are looked at as well.

    kept of a tensor    y = x W,  W ~ N(0, 1) of two columns       a rotation, a permutation or a scale of channels moves y
    changed             ‖y - y'‖ > bar ‖y‖                         the bar is far above rounding, far below a rotation
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mmqc.nn.inside import outward

BARS = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}
COLUMNS = 2

Sketches = dict[str, list[Tensor]]


class Handed:
    """What goes into and comes out of some modules and their children, before and after.

    Args:
        frames: FQNs of the modules ("" is the model).
    """

    def __init__(self, model: nn.Module, frames: Iterable[str]) -> None:
        self.model, self.frames = model, frozenset(frames)
        self.before: Sketches = {frame: [] for frame in self.frames}
        self.after: Sketches = {frame: [] for frame in self.frames}
        self.given: tuple[Sketches, Sketches] = ({}, {})  # what modules gave, before and after

    @contextmanager
    def watched(self, after: bool) -> Iterator[None]:
        """Look at one more call of the model."""
        into = self.after if after else self.before
        given, first = self.given[after], not self.given[after]
        with ExitStack() as hooks:
            for name, module in outward(self.model) if first else ():
                handle = module.register_forward_hook(_Looking(given.setdefault(name, []), outputs_only=True), with_kwargs=True)
                hooks.callback(handle.remove)
            for frame in self.frames:
                for module in _with_children(self.model.get_submodule(frame)):
                    handle = module.register_forward_hook(_Looking(into[frame]), with_kwargs=True)
                    hooks.callback(handle.remove)
            yield

    def changed(self, dtype: torch.dtype) -> set[str]:
        """The modules of which something changed."""
        return {frame for frame in self.frames if self._differ(self.before[frame], self.after[frame], BARS[dtype])}

    def inside(self, dtype: torch.dtype) -> list[str]:
        """The modules that give something else than they did, of those that hold others (nn/inside.py), in a call of the model."""
        before, after = self.given
        return [name for name in before if self._differ(before[name], after.get(name, []), BARS[dtype])]

    def _differ(self, before: list[Tensor], after: list[Tensor], bar: float) -> bool:
        if [y.shape for y in before] != [y.shape for y in after]:
            return True
        return any(bool((a - b).norm() > bar * b.norm()) for b, a in zip(before, after, strict=True))


class _Looking:
    """Forward hook."""

    def __init__(self, into: list[Tensor], outputs_only: bool = False) -> None:
        self.into, self.outputs_only = into, outputs_only

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del module
        looked_at = output if self.outputs_only else (args, kwargs, output)
        leaves = pytree.tree_leaves(looked_at, is_leaf=_is_cache)
        self.into += [_sketch(t) for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def _is_cache(value: Any) -> bool:
    """Keys and values of a layer are its own affair."""
    return hasattr(value, "get_seq_length")


@torch.no_grad()
def _sketch(x: Tensor) -> Tensor:
    """[rows, COLUMNS] on the CPU."""
    width = x.shape[-1] if x.dim() else 1
    w = torch.randn(width, COLUMNS, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return (torch.nan_to_num(x.detach().float()).reshape(-1, width) @ w.to(x.device, torch.float32)).cpu().double()


def _with_children(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those right below it, through lists."""
    yield module
    waiting = list(module.children())
    for child in waiting:
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            waiting += child.children()
        else:
            yield child
