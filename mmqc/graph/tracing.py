"""Dynamo, around one trace: what runs before a frame is traced, and the flags that are in force meanwhile.

    torch.compile(model, backend=ours)(batch) ─► start(frame) ─► trace under our flags ─► backend ─► end(error)

Dynamo announces every compilation to its callbacks; the backend that asked for it and the frame are on the Python stack then.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary, WeakSet

import sympy
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import ConvertFrame, ConvertFrameAssert, compile_lock
from torch._dynamo.eval_frame import innermost_fn, skip_code
from torch._dynamo.exc import Unsupported
from torch._dynamo.source import DynamicScalarSource, TensorProperty
from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator
from torch._dynamo.utils import _get_error_on_graph_break, graph_break_reasons
from torch._dynamo.variables import SymNodeVariable, builder
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental import _config as _shape_config
from torch.fx.experimental.sym_node import DynamicInt
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound, ShapeEnv

from mmqc.graph.capture import outermost_module
from mmqc.graph.chance import chance_left_open
from mmqc.graph.collections_off import count_as_old, without_collections
from mmqc.graph.environment import environment
from mmqc.graph.roots import roots_are_constants
from mmqc.traced import ANSWER, is_traced

shape_config: Any = _shape_config  # a module that turns itself into an object with ``patch``

CAPTURE: dict[str, Any] = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
# Sizes that happen to be equal in one batch (three positions per token, three sequence ends) are not in the next.
SHAPES: dict[str, Any] = {"use_duck_shape": False}
# Prompts and steps, with and without images, of one sequence and of several, padded or not: Dynamo's own limit of 8 is met in
# five calls, and what comes behind it runs eagerly.
PROGRAMS = 32
DYNAMOS: int = vars(torch._dynamo.config)["_config"]["recompile_limit"].default
# With ``dynamic=True`` a norm's epsilon would be a symbol, too, which no pass can read.
FLOATS: dict[str, Any] = {"specialize_float": True}

# Before 2.13 a traced torch._check_tensor_all leaves an unbacked symbol behind that nothing binds: transformers' checks of
# placeholder counts are then left out of the trace.
CHECKS_TRACE: bool = torch.__version__ >= (2, 13)  # type: ignore[operator]
NO_CHECKS = {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}

# What torch raises where a trace, or code that is generated, would need a value that only data says, and nothing else.
DATA_DEPENDENT = (
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
    DataDependentOutputException,
    DynamicOutputShapeException,
)

ALIKE = "_mmqc_alike"
MARKS = ("_dynamo", "_has_dynamo", "_specialize_on", ALIKE)  # what Dynamo, or we, hang on a tensor begins with one of these
PENDING = "_CompilationCallbackHandler__pending_callbacks_counter"


@dataclass(frozen=True)
class Frame:
    """A frame that is about to be traced: the module whose forward it is, and the arguments that are bound to it."""

    model: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


class _Lasting(list):  # type: ignore[type-arg]
    """``torch._dynamo.reset`` forgets every callback, but the backend that needs this one stays registered."""

    def __init__(self, kept: Any, others: list[Any]) -> None:
        super().__init__([kept, *(o for o in others if o is not kept)])
        self.kept = kept

    def clear(self) -> None:
        """All but ours."""
        self[:] = [self.kept]


class Tracing:
    """The two callbacks of one backend.

    Args:
        backend: the function that torch.compile was given, perhaps in wrappers.
        start: is told the frame, and answers whether values may be traced as symbols, and whether sizes that happen to be
            equal now may differ in the next call.
        end: is told why a compilation failed for a value that only data says, if it did, and the model that ``start`` was asked
            about; for a function that is no model's forward, in that case alone.
    """

    def __init__(
        self, backend: Any, start: Callable[[Frame], tuple[bool, bool]], end: Callable[[nn.Module | None, str], None]
    ) -> None:
        self.backend, self.start, self.end = backend, start, end
        self.flags: ExitStack | None = None
        self.model: nn.Module | None = None
        self.whole = False  # whether the caller wants one graph or an error
        self.broken: WeakSet[Any] = WeakSet()

    def install(self) -> None:
        """Register with Dynamo, for good."""
        callback_handler.start_callbacks = _Lasting(self.on_start, callback_handler.start_callbacks)
        callback_handler.end_callbacks = _Lasting(self.on_end, callback_handler.end_callbacks)

    def on_start(self, args: Any) -> None:
        """Before a frame is traced."""
        del args
        converting = _converting()
        if converting is None or not _is_behind(converting[0], self.backend):
            return
        self.flags, self.whole = ExitStack(), isinstance(converting[0], ConvertFrameAssert)
        # A trace makes millions of objects and keeps most: looking through them for garbage took a tenth of a compilation.
        self.flags.enter_context(without_collections())
        if not torch._dynamo.config.assume_static_by_default:
            self.flags.enter_context(torch._dynamo.config.patch(FLOATS))
        frame = _model_frame(converting[1])
        self.allow_programs(converting[0], whole=frame is not None)
        if frame is None:
            return
        self.model = frame.model
        with as_traced(False):
            capture, sizes = self.start(frame)
        if sizes:
            self.flags.enter_context(shape_config.patch(SHAPES))
            self.flags.enter_context(mock.patch.object(Translator, "_format_value", _format_later))
        if not CHECKS_TRACE:
            self.flags.enter_context(environment(NO_CHECKS))
        self.flags.enter_context(one_symbol_for_all())
        self.flags.enter_context(chance_left_open(varies))
        self.flags.enter_context(as_tensor_of_numbers())
        self.flags.enter_context(roots_are_constants())
        if capture:
            self.flags.enter_context(torch._dynamo.config.patch(CAPTURE))

    def allow_programs(self, converter: Any, whole: bool) -> None:
        """Of a model that is one graph, from the next trace of this torch.compile on; a limit that the caller has set stays.

        The parts of one that breaks keep Dynamo's limit, each its own.  Before torch 2.13 there is one limit for the whole
        process, which is left alone.
        """
        if not whole:
            self.broken.add(converter)
        default = torch._dynamo.config.recompile_limit in (DYNAMOS, PROGRAMS)
        if default and getattr(converter, "_recompile_limit", DYNAMOS) is None:
            inner = getattr(converter, "_inner_convert", converter)
            inner._recompile_limit = None if converter in self.broken else PROGRAMS

    def on_end(self, args: Any) -> None:
        """After it, also when an error is on its way."""
        del args
        try:
            self._finish()
        except BaseException:  # a Ctrl-C, too
            # Dynamo counts only callbacks that return, and cannot be reset while one has not.
            setattr(callback_handler, PENDING, getattr(callback_handler, PENDING) - 1)
            raise

    def _finish(self) -> None:
        """What was set for the trace goes back, whatever comes between."""
        flags, model, self.flags, self.model = self.flags, self.model, None, None
        error = sys.exc_info()[1]
        breaks = flags is not None and not self.whole and not _get_error_on_graph_break()
        reason = data_dependent(error) if breaks else ""
        try:
            if flags is not None:
                flags.close()
                if not torch.cuda.is_available():  # garbage that held memory of a GPU would be missed: there, Dynamo looks now
                    count_as_old()
        finally:
            if model is not None or reason:
                self.end(model, reason)
        if reason:  # Dynamo runs a frame that it cannot trace as it is, and compiles what it calls
            raise Unsupported(f"mmqc: {reason}") from error


def data_dependent(error: BaseException | None) -> str:
    """Why a compilation needed a value that it does not have; empty for any other error."""
    for _ in range(20):
        if error is None:
            return ""
        if isinstance(error, DATA_DEPENDENT):
            return str(error).strip().splitlines()[0].rstrip(".")
        error = error.__cause__ or error.__context__
    return ""


_format_now = Translator._format_value


def _format_later(translator: Any, form: Any, flags: int) -> None:
    """A size in an f-string is written where the string is needed, if ever: Dynamo would take the size for a constant.

    transformers writes how many features there are into the message of a check that holds.
    """
    if isinstance(translator.stack[-1], SymNodeVariable):
        words = "{:" + form.as_python_constant() + "}"
        translator.push(StringFormatVariable(words, [translator.pop()], {}))
    else:
        _format_now(translator, form, flags)


@contextmanager
def as_tensor_of_numbers() -> Iterator[None]:
    """``torch.as_tensor`` of numbers that vary is traced as ``torch.tensor`` is: Dynamo would take each of them for a constant."""
    handlers = TorchInGraphFunctionVariable._get_handlers()

    def handle(function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(("data", "dtype", "device"), args, strict=False)), **kwargs}
        return handlers[torch.tensor](function, translator, given.pop("data"), **given)

    with mock.patch.dict(handlers, {torch.as_tensor: handle}):
        yield


def may_vary(tensor: Tensor, sizes: Sequence[int], alike: str = "") -> Callable[[], None]:
    """Mark these sizes as ones that another call changes; returns what takes the marks back.

    A size of tensors that are ``alike``, by this name, is one symbol for all that have as much of it (``one_symbol_for_all``).
    """
    before = {name: copy.copy(mark) for name, mark in vars(tensor).items() if name.startswith(MARKS)}
    torch._dynamo.maybe_mark_dynamic(tensor, list(sizes))
    if alike:
        setattr(tensor, ALIKE, alike)

    def undo() -> None:
        for name in [name for name in vars(tensor) if name.startswith(MARKS)]:
            delattr(tensor, name)
        for name, mark in before.items():
            setattr(tensor, name, mark)

    return undo


@contextmanager
def one_symbol_for_all() -> Iterator[None]:
    """A size of tensors that are alike is one symbol: Dynamo has one for each, which it compares, replaces and guards one by one.

    The 28 layers of a cache have 56 lengths and 56 numbers of sequences.  This is what Dynamo calls duck shaping, for those
    tensors alone: that they agree is guarded, as there.
    """
    of_env: WeakKeyDictionary[ShapeEnv, dict[Any, Any]] = WeakKeyDictionary()
    names: dict[int, tuple[Any, str]] = {}  # by the id of what is known of a tensor's sizes, which is kept
    make, create = builder._automatic_dynamic, ShapeEnv.create_symbol

    def context(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        known = make(tensor, *args, **kwargs)
        if alike := getattr(tensor, ALIKE, ""):
            names[id(known)] = known, alike
        return known

    def symbol(env: ShapeEnv, value: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        known, alike = names.get(id(kwargs.get("symbolic_context")), (None, ""))
        if known is None or getattr(source, "prop", None) is not TensorProperty.SIZE:
            return create(env, value, source, *args, **kwargs)
        ours = of_env.setdefault(env, {})
        which, name, seen = (alike, source.idx, value), source.name, known.shape_env_to_source_to_symbol_cache.get(id(env), {})
        if which not in ours or name in seen:
            ours[which] = create(env, value, source, *args, **kwargs)
        elif isinstance(ours[which], sympy.Symbol):
            env.source_to_var[name] = ours[which]
            env.var_to_sources[ours[which]].append(source)
        return ours[which]

    with mock.patch.object(builder, "_automatic_dynamic", context), mock.patch.object(ShapeEnv, "create_symbol", symbol):
        yield


@contextmanager
def at_least_programs() -> Iterator[None]:
    """A function may be compiled ``PROGRAMS`` times meanwhile: beyond its limit Dynamo runs it eagerly, with a warning."""
    limit = max(PROGRAMS, torch._dynamo.config.recompile_limit)
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


def traced_place() -> str:
    """The function whose frame is being traced, with its file and line; empty outside a trace."""
    converting = _converting()
    if converting is None:
        return ""
    code, owner = converting[1].f_code, converting[1].f_locals.get("self")
    name = code.co_qualname
    if isinstance(owner, nn.Module) and is_frame_of(type(owner).forward, converting[1]):
        code = inspect.unwrap(type(owner).forward).__code__  # a decorator's frame says little
        name = f"{type(owner).__name__}.forward"
    return f"{name} at {code.co_filename}:{code.co_firstlineno}"


@dataclass(frozen=True)
class Break:
    """Where one graph ends and another has to begin."""

    reason: str
    where: str


@contextmanager
def collect_breaks() -> Iterator[list[Break]]:
    """The graph breaks inside the ``with``, each with the innermost line of the model's code."""
    found: list[Break] = []
    before = len(graph_break_reasons)
    try:
        yield found
    finally:
        for entry in graph_break_reasons[before:]:
            stack = entry.user_stack
            where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "?"
            found.append(Break(_first_lines(str(entry.reason)), where))


def _first_lines(reason: str) -> str:
    """What happened, and Dynamo's explanation of it, in one line."""
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    explanation = next((line for line in lines if line.startswith("Explanation:")), "")
    return " ".join(filter(None, (lines[0] if lines else "?", explanation)))


def _converting() -> tuple[Any, Any] | None:
    """Dynamo's converter and the frame that it is about to trace; with ``fullgraph=True`` the converter is one that asserts."""
    frame: FrameType | None = sys._getframe(1)
    inner: tuple[Any, Any] | None = None
    while frame is not None:
        converter = frame.f_locals.get("self")
        if inner is None and isinstance(converter, ConvertFrameAssert) and "frame" in frame.f_locals:
            inner = converter, frame.f_locals["frame"]
        elif inner is not None and isinstance(converter, ConvertFrame) and converter._inner_convert is inner[0]:
            return converter, inner[1]
        frame = frame.f_back
    return inner


def _is_behind(wrapper: Any, backend: Any) -> bool:
    """Whether unwrapping leads to ``backend``."""
    for _ in range(10):
        if wrapper is backend:
            return True
        for name in ("_torchdynamo_orig_backend", "compiler_fn", "func"):
            if getattr(wrapper, name, None) is not None:
                wrapper = getattr(wrapper, name)
                break
        else:
            return False
    return False


def _model_frame(frame: Any) -> Frame | None:
    """The frame as the forward of the outermost module that is being called or compiled, if it is that."""
    values, names = frame.f_locals, frame.f_code.co_varnames
    model = values.get(names[0]) if names else None  # "self", as a rule
    if not isinstance(model, nn.Module) or not _is_called(model):
        return None
    if outermost_module() is not model and not _is_compiled_alone(model):
        return None
    if not is_frame_of(type(model).forward, frame):
        return None
    return Frame(model, _arguments(frame.f_code, values))


def codes_of(function: Any) -> set[CodeType]:
    """The code of a function or method and of those that it decorates."""
    return {one.__code__ for one in _decorated(function) if hasattr(one, "__code__")}


def is_frame_of(function: Any, frame: Any) -> bool:
    """Whether a function, or one that it decorates, runs in this frame.

    All functions of one decorator have one code: its frame also has to hold the function that is decorated here.
    """
    for one in _decorated(function):
        if getattr(one, "__code__", None) is not frame.f_code:
            continue
        inside = getattr(one, "__wrapped__", None)
        held = [frame.f_locals.get(name) for name in frame.f_code.co_freevars]
        if inside is None or not held or any(value is inside for value in held):
            return True
    return False


def _decorated(function: Any) -> Iterator[Any]:
    """A function or method, and those that it decorates, one after the other."""
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_called(model: nn.Module) -> bool:
    """Whether ``model`` itself was called, so that its hooks run from the next call on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def _is_compiled_alone(part: nn.Module) -> bool:
    """Whether a part of a model is what ``torch.compile`` was given, and has layers: a layer has nothing to prepare."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner is not part:
            return False
        if frame.f_code.co_name == "compile_wrapper":  # of torch.compile; further out is who calls the part
            return any(isinstance(module, nn.ModuleList) for module in part.modules())
        frame = frame.f_back
    return False


def _arguments(code: CodeType, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = code.co_varnames
    n = code.co_argcount + code.co_kwonlyargcount
    kwargs = {name: values[name] for name in names[1:n] if name in values}
    args: tuple[Any, ...] = ()
    if code.co_flags & inspect.CO_VARARGS:
        args, n = values[names[n]], n + 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs.update(values[names[n]])
    return args, kwargs


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compile`` was handed, of the function that it gave; any other as it is."""
    return innermost_fn(function)


@contextmanager
def as_traced(compiling: bool = True) -> Iterator[None]:
    """Run eagerly what asks ``torch.compiler.is_compiling()``, with the answer that it gets in a trace.

    Torch's flag is of the process, and whoever compiles puts back what it has found there: nobody does meanwhile.
    """
    with compile_lock:
        before = torch.compiler._is_compiling_flag, ANSWER.traced
        torch.compiler._is_compiling_flag = ANSWER.traced = compiling
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag, ANSWER.traced = before


def run_eagerly(functions: Iterable[Any]) -> None:
    """Functions that Dynamo runs as they are when they are called from uncompiled code; in a trace it follows them."""
    for function in functions:
        skip_code(function.__code__)


run_eagerly((is_traced,))  # compiled as a graph of its own it would be true of eager code, too


def varies(source: Any) -> bool:
    """Whether a symbol's source is one of the numbers that ``varying`` has marked."""
    return isinstance(source, DynamicScalarSource)


def varying(value: Any) -> Any:
    """``value`` with every number marked as one that varies, so that Dynamo does not compile anew for another."""
    if type(value) is int:
        return DynamicInt(value)
    if isinstance(value, list) or type(value) is tuple:  # also a list that knows more, such as front/numbers.py
        return type(value)(varying(v) for v in value)
    return value
