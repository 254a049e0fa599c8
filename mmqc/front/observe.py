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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from mmqc.graph.reads import SIZE_READS, cut_by_values, sizing

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
    sizing.__code__.co_filename,
)


@dataclass(frozen=True)
class Input:
    """A tensor argument of the observed forward, by name."""

    name: str


@dataclass
class Call:
    """One call of a Python function, with its arguments as it was called; ``scopes`` are its callers' globals, innermost first.

    It ``weighs`` if an operation in it was given a parameter, or what parameters made.  It holds no frame and no activation: those
    of a whole forward would be alive at once.  A float tensor is on the meta device.
    """

    code: CodeType
    scopes: tuple[dict[str, Any], ...]
    arguments: dict[str, Any]
    reads: list[Read] = field(default_factory=list)
    outer: Call | None = None
    returned: Any = None
    weighs: bool = False

    @property
    def owner(self) -> nn.Module | None:
        """The module whose method this is."""
        owner = self.arguments.get("self")
        return owner if isinstance(owner, nn.Module) else None

    def around(self) -> Iterator[Call]:
        """This call and those it was made by, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.outer


@dataclass(frozen=True)
class Read:
    """A read, the calls around it, and the line that it stands in."""

    op: str
    call: Call | None
    where: str

    @property
    def scalar(self) -> bool:
        """Whether a Python number came out of it, rather than a tensor of unknown size."""
        return self.op not in SIZE_READS

    def __str__(self) -> str:
        return f"{self.op} at {self.where}"


@dataclass
class Observation:
    """What one forward did."""

    output: Any
    reads: list[Read]
    calls: list[Call]


class _Watch(TorchFunctionMode):
    """Collects calls by the profiler's events and reads by torch's; both nest in one thread."""

    def __init__(self, ignored: frozenset[str]) -> None:
        super().__init__()
        self.ignored = ignored
        self.foreign: dict[CodeType, bool] = {}
        self.stack: list[tuple[FrameType, Call | None]] = []
        self.calls: list[Call] = []
        self.reads: list[Read] = []
        self.of_weights = WeakIdKeyDictionary()

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """``sys.setprofile``'s callback."""
        if event == "call":
            call = None if self._is_foreign(frame.f_code) else self._call(frame)
            if call is not None:
                self.calls.append(call)
                if call.code.co_name == "forward" and type(call.owner).__module__.startswith("mmqc."):
                    _weigh(call)  # its weights are buffers
            self.stack.append((frame, call))
        elif event == "return":
            while self.stack:
                known, call = self.stack.pop()
                if known is frame:
                    if call is not None:
                        call.returned = shape_of_floats(arg)
                        self._came_of_weights(arg if call.weighs else None)
                    break

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
        arguments = {name: shape_of_floats(values[name]) for name in names if name in values}
        return Call(code, _scopes(frame.f_back), arguments, outer=self.innermost())

    def innermost(self) -> Call | None:
        """The innermost call in progress that is not torch's."""
        return next((call for _, call in reversed(self.stack) if call is not None), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if is_read(name, args, kwargs or {}):
            self._read(name)
        elif cut_by_values(name, args):
            self._read(SLICE)
        result = func(*args, **(kwargs or {}))
        given = tensors_in((args, kwargs), depth=0)
        if any(isinstance(t, nn.Parameter) or t in self.of_weights for t in given):
            _weigh(self.innermost())
            self._came_of_weights(result)
        return result

    def _came_of_weights(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.is_floating_point():
                self.of_weights[tensor] = True

    def _read(self, name: str) -> None:
        call = self.innermost()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and self._is_foreign(frame.f_code):
            frame = frame.f_back
        if call is not None and any(c.code.co_name in self.ignored for c in call.around()):
            return
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
        read = Read(name, call, where)
        self.reads.append(read)
        for outer in call.around() if call is not None else ():
            outer.reads.append(read)


def _weigh(call: Call | None) -> None:
    for outer in call.around() if call is not None else ():
        if outer.weighs:
            break
        outer.weighs = True


def shape_of_floats(value: Any) -> Any:
    """Containers copied (functions pop from their keyword arguments), float tensors in them on the meta device."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if type(value) is dict:
        return {k: shape_of_floats(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(shape_of_floats(v) for v in value)
    if isinstance(value, Mapping) and not isinstance(value, type):  # a ModelOutput
        try:
            return {k: shape_of_floats(v) for k, v in value.items()} if value else value
        except AttributeError:  # half made: it is in its own ``__init__``
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


def observe(forward: Callable[[], Any], ignored: frozenset[str]) -> Observation:
    """Run ``forward`` and tell what it read; reads inside functions called ``ignored`` do not count."""
    watch = _Watch(ignored)
    with watch, _profiled(watch.profile):
        output = forward()
    return Observation(output, watch.reads, watch.calls)


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


def is_metadata(call: Call, inputs: Mapping[int, str]) -> bool:
    """Whether all tensors among the arguments are integer inputs, and there is at least one."""
    tensors = list(tensors_in({k: v for k, v in call.arguments.items() if not isinstance(v, nn.Module)}))
    if any(isinstance(v, nn.Module) for k, v in call.arguments.items() if k != "self"):
        return False
    return bool(tensors) and all(not t.is_floating_point() and id(t) in inputs for t in tensors)


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors in nested containers, and in plain objects such as caches."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        yield from tensors_in(vars(value), depth - 1)
