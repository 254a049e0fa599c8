"""Watch one eager forward: where it reads values out of tensors, and which of its functions could run in front of it.

A *read* is an operation whose result depends on the values of a tensor in a way that no graph can hold: ``tolist``, ``item``,
a Python condition, the bound of a slice, a data-dependent size.  A *metadata call* is the outermost Python function around a
read whose tensor arguments are all integer inputs of the forward: what it returns can be computed before the forward starts.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmqc.front.places import Call, Read
from mmqc.front.provenance import FEW, Operation, Provenance, parts, tensors_in, whole_numbers
from mmqc.graph.reads import cut_by_values, sizing

logger = logging.getLogger(__name__)

SCALAR_READS = frozenset(("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "numpy", "__contains__"))
SLICE = "slice"  # its bounds are read
# Whose functions are no part of the model's code.  Those of kernels have dozens of arguments, and there are many of them.
_triton = importlib.util.find_spec("triton")
FOREIGN = (
    str(Path(torch.__file__).parent),
    *([str(Path(_triton.origin).parent)] if _triton is not None and _triton.origin else []),
    *(str(Path(__file__).parents[1] / room) for room in ("kernels", "ops")),
    "<frozen",
    __file__,
    Call.around.__code__.co_filename,
    Provenance.operation.__code__.co_filename,
    sizing.__code__.co_filename,
)


@dataclass
class Observation:
    """What one forward did."""

    output: Any
    reads: list[Read]
    calls: list[Call]


class _Watch(TorchFunctionMode):
    """Collects calls by the profiler's events and reads by torch's; both nest in one thread."""

    def __init__(self, ignored: frozenset[str], inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.ignored, self.provenance = ignored, Provenance(inputs)
        self.foreign: dict[CodeType, bool] = {}
        self.stack: list[tuple[FrameType, Call | None]] = []
        self.calls: list[Call] = []
        self.reads: list[Read] = []
        self.of_weights: dict[int, weakref.ref[Tensor]] = {}

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """``sys.setprofile``'s callback."""
        if event == "call":
            call = None if self._is_foreign(frame.f_code) else self._call(frame)
            if call is not None:
                self.calls.append(call)
                if call.code.co_name == "forward" and type(call.owner).__module__.startswith("mmqc."):
                    call.weighs = True  # its weights are buffers
            self.stack.append((frame, call))
        elif event == "return":
            while self.stack:
                known, call = self.stack.pop()
                if known is frame:
                    if call is not None:
                        self._returned(call, arg)
                    break

    def _returned(self, call: Call, value: Any) -> None:
        call.returned = shape_of_floats(value)
        if call.weighs:
            self._weighed(value)
        elif call.recipe is not None:
            self.provenance.returned(call, value)

    def _is_foreign(self, code: CodeType) -> bool:
        if code not in self.foreign:
            self.foreign[code] = code.co_filename.startswith(FOREIGN)
        return self.foreign[code]

    def _call(self, frame: FrameType) -> Call:
        code = frame.f_code
        n = code.co_argcount + code.co_kwonlyargcount
        names = list(code.co_varnames[: n + bool(code.co_flags & inspect.CO_VARARGS)])
        if code.co_flags & inspect.CO_VARKEYWORDS:
            names.append(code.co_varnames[len(names)])
        values = frame.f_locals
        given = {name: values[name] for name in names if name in values}
        arguments = {name: shape_of_floats(value) for name, value in given.items()}
        return Call(code, _scopes(frame.f_back), arguments, outer=self.innermost(), recipe=self.provenance.arguments(given))

    def innermost(self) -> Call | None:
        """The innermost call in progress that is not torch's."""
        for _, call in reversed(self.stack):
            if call is not None:
                return call
        return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every Python function that is called from here is an event of the profiler, and there are thousands of operations.
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        read = name if is_read(name, args, kwargs) else SLICE if cut_by_values(name, args) else ""
        result = func(*args, **kwargs)
        if read:
            self._read(read, result, self.provenance.giver.get(id(args[0])) if args else None)
        known = False
        for value in (*args, *kwargs.values()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(tensor, Tensor):
                    continue
                ref = self.of_weights.get(id(tensor))
                if isinstance(tensor, nn.Parameter) or (ref is not None and ref() is tensor):
                    self._weighed(result)
                    return result
                known = known or id(tensor) in self.provenance.names or id(tensor) in self.provenance.known
        if known:
            self.provenance.operation(func, args, kwargs, result)
        return result

    def _weighed(self, result: Any) -> None:
        """A weight, or what came of one, went into an operation."""
        call = self.innermost()
        while call is not None and not call.weighs:
            call.weighs = True
            call = call.outer
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            if tensor.is_floating_point():
                self.of_weights[id(tensor)] = weakref.ref(tensor)

    def _read(self, name: str, result: Any, giver: Call | None) -> None:
        call = self.innermost()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and self._is_foreign(frame.f_code):
            frame = frame.f_back
        if call is not None and any(c.code.co_name in self.ignored for c in call.around()):
            return
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
        read = Read(name, call, where, len(self.calls), frozenset(whole_numbers(result)), giver)
        self.reads.append(read)
        for outer in call.around() if call is not None else ():
            outer.reads.append(read)


def shape_of_floats(value: Any) -> Any:
    """Containers copied (functions pop from their keyword arguments), float tensors in them on the meta device.

    Their items are listed first: a table that a function was given may grow in another thread meanwhile.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if type(value) is dict:
        return {k: shape_of_floats(v) for k, v in [*value.items()]}
    if type(value) in (list, tuple):
        return type(value)(shape_of_floats(v) for v in [*value])
    if isinstance(value, Mapping) and not isinstance(value, type):  # a ModelOutput
        try:
            return {k: shape_of_floats(v) for k, v in [*value.items()]} if value else value
        except Exception:  # half made, in its own ``__init__``; or a table of offloaded weights, which names others'
            return value
    return value


def _scopes(frame: FrameType | None, depth: int = 3) -> tuple[dict[str, Any], ...]:
    """Globals of a caller and of those behind it: a comprehension or a decorator may stand between."""
    found = []
    while frame is not None and len(found) < depth:
        found.append(frame.f_globals)
        frame = frame.f_back
    return tuple(found)


def is_read(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether calling the torch function ``name`` takes values out of a tensor."""
    return name in SCALAR_READS or bool(sizing(name, args, kwargs))


def observe(forward: Callable[[], Any], ignored: frozenset[str], inputs: Mapping[str, Tensor]) -> Observation:
    """Run ``forward`` on ``inputs`` and tell what it read; reads inside functions called ``ignored`` do not count."""
    watch = _Watch(ignored, inputs)
    with watch, _profiled(watch.profile):
        output = forward()
    _without_numbers_that_were_read(watch.calls, watch.reads)
    return Observation(output, watch.reads, watch.calls)


def _without_numbers_that_were_read(calls: list[Call], reads: list[Read]) -> None:
    """A call with a number among its arguments that data said, and may say otherwise the next time, has no recipe.

    Whether a number came out of a read is told by its value alone; what metadata calls read stays in them.
    """
    said, waiting, gone = set[int](), reads[::-1], set[int]()
    for i, call in enumerate(calls):
        while waiting and waiting[-1].at <= i:
            read = waiting.pop()
            if read.call is None or not any(is_metadata(c) for c in read.call.around()):
                said |= read.numbers
        if call.recipe is not None and (said & {*whole_numbers(call.arguments)} or _uses(call.recipe, gone, said)):
            gone.add(id(call.recipe))
            call.recipe = None


def _uses(recipe: Any, gone: set[int], said: set[int]) -> bool:
    """Whether it is made of what has no recipe any more, or by an operation that was given such a number."""
    reckons = isinstance(recipe, Operation) and any(n > FEW and n in said for n in whole_numbers((recipe.args, recipe.kwargs)))
    return id(recipe) in gone or reckons or any(_uses(part, gone, said) for part in parts(recipe))


@contextmanager
def _profiled(function: Callable[..., Any]) -> Iterator[None]:
    """``sys.setprofile`` for a while; a profiler that was on goes on behind it, also cProfile's, which is no function."""
    before: Any = sys.getprofile()
    sys.setprofile(function)
    try:
        yield
    finally:
        enable = getattr(before, "enable", None)
        sys.setprofile(before if callable(before) else None)
        if enable is not None:
            enable()
        elif before is not None and not callable(before):
            logger.warning("a profiler of %s cannot be turned on again: its record ends here", type(before))


def is_metadata(call: Call) -> bool:
    """Whether all tensors among the arguments are inputs, or made of them alone, and no weight comes into what is returned."""
    weighs = call.weighs and any(t.is_floating_point() for t in tensors_in(call.returned))
    return call.recipe is not None and not weighs
