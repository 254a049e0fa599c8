"""Sizes that another call changes are symbols from the first trace on: one program for all that are more than one.

    a size above one of an input, or of what is handed over       may change: where images of any size come, or ``sizes_vary``
    what the last forward left on a module (``rope_deltas``)      is of that call's batch: forgotten in front, where nobody reads it
    a batch of one, one image                                     are constants: programs of their own

Why:     Dynamo compiles the first sizes as constants, and those that differ in the second call with symbols.
Weakly:  what the model's code compares with a constant becomes that constant, without an error.
Not:     where ``sizes_vary(False)`` says that few shapes will come, each recorded as a CUDA graph: constants make faster kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from torch import Tensor, nn

from mmqc.front.handover import Handed
from mmqc.front.provenance import tensors_in
from mmqc.graph.tracing import may_vary

Vary = Literal["all", "batch", False] | None
_vary: ContextVar[Vary] = ContextVar("which sizes vary", default=None)
_cache: ContextVar[Any] = ContextVar("a cache whose sizes vary, too", default=None)


@contextmanager
def sizes_vary(which: Vary, cache: Any = None) -> Iterator[None]:
    """Calls that are compiled meanwhile are of any shape, of any number of sequences, or (False) of few shapes; so is ``cache``."""
    tokens = _vary.set(which), _cache.set(cache)
    try:
        yield
    finally:
        _vary.reset(tokens[0])
        _cache.reset(tokens[1])


def known_to_vary() -> bool:
    """Whether calls are of any shape, or number of sequences, with images or without."""
    return bool(_vary.get())


class Marked:
    """The tensors of one call whose sizes are marked for its trace; ``clear`` leaves them as they were."""

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def mark(self, inputs: Mapping[str, Any], handed: Handed | None) -> None:
        """Mark the sizes of a call that may be others in the next one."""
        which = _vary.get()
        if which is False:
            return
        stored = [t for t in tensors_in(_cache.get()) if t.dim()]  # keys, values [B, H, T, D], counts [B]
        batch = next((t.shape[0] for t in stored if t.dim() == 4), -1)
        given = [dict(inputs), *([handed.values, handed.arguments] if handed is not None else [])]
        for view in tensors_in(given, depth=0):
            for tensor in (view, view._base):  # Dynamo follows a view to its base, and its sizes
                if tensor is not None:
                    self._mark(tensor, [d for d, n in enumerate(tensor.shape) if which != "batch" or n == batch])
        alike = _alike(_cache.get())
        words = hasattr(_cache.get(), "packed")  # of a quantized cache, lie along either; keys and values end with a head's width
        for tensor in stored:
            lengths = ((2, 3) if words else (2,)) if which == "all" and tensor.dim() == 4 else ()
            self._mark(tensor, (0, *lengths) if tensor.shape[0] == batch else lengths, alike.get(id(tensor), ""))

    def _mark(self, tensor: Tensor, dims: Iterable[int], alike: str = "") -> None:
        self.undo.append(may_vary(tensor, [d for d in dims if tensor.shape[d] > 1], alike))

    def clear(self) -> None:
        """Take the marks back: the tensors are the caller's, and may go to another model."""
        for undo in reversed(self.undo):
            undo()
        self.undo = []


def _alike(cache: Any) -> dict[int, str]:
    """What each tensor of a cache is to its layer: those that are the same to layers of a kind have the same sizes."""
    layers = [(type(layer).__name__, tensors_in(layer)) for layer in getattr(cache, "layers", ())]
    return {id(tensor): f"{kind} {i}" for kind, tensors in layers for i, tensor in enumerate(tensors)}


def left_on(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Tensors that are plain attributes of modules, neither parameters nor buffers."""
    return [(m, name) for m in model.modules() for name, v in vars(m).items() if isinstance(v, Tensor) and v.dim()]
