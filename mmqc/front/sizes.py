"""Sizes that another call changes are symbols from the first trace on: one program for all of them, one more for a batch of one.

    a size above one of an input, or of what is handed over       may change
    one image, one tile, one segment: a first size of one         may change, too
    what a forward left on a module (``rope_deltas``)             is of the last call's batch: its first size may change
    a batch of one, one token                                     are constants: a program of their own, which is the faster for it

Why:     Dynamo compiles the first sizes as constants, the second ones with symbols, and anew for each that is one.
Weakly:  what the model's code compares with a constant becomes that constant, without an error.
Not:     where ``constant_sizes`` says that few shapes will come, each recorded as a CUDA graph: constants make faster kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from mmqc.front.handover import Handed
from mmqc.front.observe import tensors_in
from mmqc.graph.tracing import may_vary

_constant: ContextVar[bool] = ContextVar("sizes are constants", default=False)


@contextmanager
def constant_sizes(constant: bool = True) -> Iterator[None]:
    """Calls that are compiled meanwhile are of few shapes."""
    token = _constant.set(constant)
    try:
        yield
    finally:
        _constant.reset(token)


class Marked:
    """The tensors of one call whose sizes are marked for its trace; ``clear`` leaves them as they were."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def mark(self, model: nn.Module, inputs: Mapping[str, Any], handed: Handed | None) -> None:
        """Mark the sizes of a call that may be others in the next one."""
        if _constant.get():
            return
        batch = tokens_shape(model, inputs)
        for tensor in tensors_in(dict(inputs), depth=0):
            self._mark(tensor, one=tuple(tensor.shape[: len(batch)]) != batch)
        for tensor in tensors_in([handed.values, handed.arguments], depth=0) if handed is not None else ():
            self._mark(tensor, one=tensor.dim() == 1)
        for tensor in left_on(model):
            self.undo.append(may_vary(tensor, [0]))

    def clear(self) -> None:
        """Take the marks back: the tensors are the caller's, and may go to another model."""
        for undo in reversed(self.undo):
            undo()
        self.undo = []

    def _mark(self, tensor: Tensor, one: bool) -> None:
        """``one``: also a first size that is one now."""
        self.undo.append(may_vary(tensor, [d for d, size in enumerate(tensor.shape) if size > 1 or (one and d == 0)]))


def tokens_shape(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """[B, L] of the tokens: of the model's main input, or of the first integer input with two sizes; () if there is none."""
    main = inputs.get(getattr(model, "main_input_name", ""))
    given = [v for v in (main, *inputs.values()) if isinstance(v, Tensor) and v.dim() >= 2]
    tokens = (v for v in given if v is main or not (v.is_floating_point() or v.dim() > 2))
    return next((tuple(v.shape[:2]) for v in tokens), ())


def left_on(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that are plain attributes of modules, neither parameters nor buffers."""
    return (v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor) and v.dim())
