"""The hooks of one compiled model: what ``find`` found runs in front of every call of the same kind.

Attached to the outermost model when its first frame is about to be traced, so that nothing is asked of the user and a model
that is never compiled is never touched.  Between ``begin`` and ``end`` readers stand in for the functions whose results are
handed over; outside a call the model is as it was.  The model has one place for each function, so calls of a compiled model
take turns: a second thread waits for the first one's ``end``.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.front.find import Finder, Packed, Plan
from mmqc.front.handover import RUNNING, Handed, Installed, compute, numbers
from mmqc.front.kept import Kept, copied
from mmqc.front.sizes import Marked, known_to_vary, left_on
from mmqc.front.streams import Streams, devices_of
from mmqc.front.turn import Turn, caller
from mmqc.graph.tracing import Frame, run_eagerly, varying
from mmqc.nn import modality
from mmqc.nn.modality import ModalityContext, hook_owner, unhook

# Its hooks run in front of the graph, too: compiled, they would be graphs of their own.
run_eagerly(f for f in vars(ModalityContext).values() if isinstance(f, FunctionType))

# What stands between a hook and the call that it belongs to, and between the start of a trace and whoever traces.
DYNAMO = "/torch/_dynamo/"
CALLBACKS = "/mmqc/backend.py", "/mmqc/graph/tracing.py", "/torch/_dynamo/callback.py", "/contextlib.py"

PATIENCE = 20.0  # seconds for another model's call to end, with everybody's compilation waiting

Kind = tuple[tuple[str, int], ...]


class Places(Turn):
    """Whose readers are among the globals of Python modules, where all models of a class look functions up: one call's at a time.

    Attributes:
        last: what is there, until its call ends; longer if that failed without its hooks.
    """

    last: Installed | None = None

    def take(self, frame: FrameType, wait: bool | float = True) -> bool:
        """The turn, with the functions themselves in their places."""
        taken = super().take(frame, wait)
        if taken and self.last is not None and len(self.frames) == 1:
            self.last.remove()
            self.last = None
        return taken


PLACES = Places()


class _Call(threading.local):
    """What a thread's call in progress has of a front.

    Attributes:
        capture: whether Dynamo may trace values and data-dependent sizes as symbols in it; a call that nothing is prepared for,
            of text alone, goes by the one before it, and the first may.
        inputs: the integer tensors that it was given, by name (of the first call until the second).
        early: whether it was prepared for a trace alone, its hooks not having run.
        places: whether it has the turn of ``PLACES``.
        marked: what has sizes that are symbols in the trace in progress.
    """

    def __init__(self) -> None:
        self.early = False
        self.places = False
        self.marked = Marked()
        self.capture = True
        self.inputs: dict[str, Any] = {}


class Front:
    """What runs in front of one model.

    Attributes:
        plans: by kind of call: names and ranks of its tensors.
        call: the calling thread's call in progress.
        turn: is held by the thread whose call it is.
        streams: what the last call was launched on.
        active: what was put in place for that call.
        forgotten: what the last call left on modules, until this one leaves it anew.
    """

    def __init__(self) -> None:
        self.number = next(numbers)
        self.plans: dict[Kind, Plan] = {}
        self.installed: dict[Kind, Installed] = {}
        self.kept: dict[tuple[Kind, Any], Kept] = {}
        self.call = _Call()
        self.turn = Turn()
        self.streams = Streams()
        self.active: tuple[Packed, Installed] | None = None
        self.forgotten: list[tuple[nn.Module, str, Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Front:
        # plans hold modules of the original
        return Front()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Front, ()

    def __del__(self, running: Any = RUNNING) -> None:  # an argument: at the end of Python the module's names are gone
        running.table.pop(self.number, None)

    @classmethod
    def attach(cls, model: nn.Module) -> Front:
        """The front of ``model``, made and hooked to it if it has none."""
        front = attached(model)
        if front is None:
            front = cls()
            begin, end = getattr(front, "begin"), getattr(front, "end")  # noqa: B009  (a disabled function, to a type checker)
            model.register_forward_pre_hook(begin, with_kwargs=True)
            model.register_forward_hook(end, always_call=True)
        return front

    @torch.compiler.disable
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: wait for this call's turn, and prepare it."""
        call = caller(DYNAMO)
        self.turn.take(call)
        inputs = bound(model, args, kwargs)
        self.streams.follow(devices_of(inputs))
        self.prepare(model, inputs, call)

    @torch.compiler.disable
    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook, called after an error too: put everything back."""
        del model, args, output
        # Not mine any more where the call failed, whose frame has ended, or where another hook raised in front of ``begin``; if
        # another thread has it, that one put everything back.
        if self.turn.is_mine() or self.turn.take(caller(DYNAMO), wait=False):
            self.clear()
            self.turn.give()

    def prepare(self, model: nn.Module, inputs: Mapping[str, Any], call: FrameType, wait: bool | float = True) -> bool:
        """Compute what this call needs, and put the readers in; False if another model's are there, and stay there."""
        self.clear()
        self.call.inputs = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and not v.is_floating_point()}
        kind = kind_of(inputs)
        if not brings_features(inputs):
            return True
        if kind not in self.plans or self.installed[kind].shared:
            if not PLACES.take(call, wait):
                return False
            self.call.places = True
        if kind not in self.plans:
            self._find(kind, model, inputs)
        if not self.plans[kind].sites and not self.plans[kind].configs:
            self.call.capture = self.plans[kind].capture
            return True
        try:
            handed = self._handed(kind, model, inputs)
        except Exception as error:  # a function returned something for each image, say, and there are fewer now
            self._find(kind, model, inputs)
            self.plans[kind].notes.append(f"found anew, for what was found did not fit a batch: {type(error).__name__}: {error}")
            handed = self._handed(kind, model, inputs)
        plan = self.plans[kind]
        self.call.capture = plan.capture
        RUNNING.table[self.number] = handed
        self.active = (Packed(plan.configs), self.installed[kind])
        self.active[0].__enter__()
        self.active[1].put()
        if self.call.places:
            PLACES.last = self.active[1]
        self.forgotten = [(module, name, vars(module).get(name)) for module, name in plan.forgets]
        for module, name, _ in self.forgotten:
            vars(module)[name] = None
        return True

    def _find(self, kind: Kind, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        plan = self.plans[kind] = Finder(self.number, model, inputs).find()
        self.installed[kind] = Installed(self.number, plan.sites)
        for known in [key for key in self.kept if key[0] == kind]:
            del self.kept[known]

    def _handed(self, kind: Kind, model: nn.Module, inputs: Mapping[str, Any]) -> Handed:
        """What is kept for these inputs, or else computed."""
        plan = self.plans[kind]
        kept = self.kept.setdefault((kind, getattr(model, "dtype", None)), Kept(plan.sites))
        handed = kept.get(self.call.inputs)
        if handed is None:
            with torch.no_grad(), Packed(plan.configs):
                compute(self.number, plan.sites, inputs)
            handed = copied(RUNNING.table[self.number])  # a view of something else would ask for a graph of its own
            handed.values, handed.arguments = varying(handed.values), varying(handed.arguments)
            kept.put(self.call.inputs, handed)
        return handed

    def clear(self) -> None:
        """The model as it was; a call that failed leaves what the one before it left."""
        self.call.inputs = {}
        for module, name, value in self.forgotten:
            if vars(module).get(name) is None:
                vars(module)[name] = value
        self.forgotten = []
        if self.active is not None:
            packed, installed = self.active
            installed.remove()
            packed.__exit__()
            self.active = None
        if self.call.places and PLACES.is_mine():  # the call may have ended by itself
            PLACES.last = None  # which has the model
            PLACES.give()
        self.call.places = False

    def refuse(self, reason: str) -> None:
        """Dynamo could not trace with symbolic values: it will not be asked again."""
        for plan in self.plans.values():
            if plan.capture:
                plan.capture = False
                plan.notes.append(f"not traced as one graph: {reason}")
        self.call.capture = False

    @property
    def notes(self) -> list[str]:
        """The record: what is prepared, and what is not."""
        return list(dict.fromkeys(note for plan in self.plans.values() for note in plan.notes))


def detach(model: nn.Module) -> None:
    """Remove the front from ``model``, and what it put in place for a call."""
    front = attached(model)
    if front is not None:
        front.clear()
        unhook(model, Front)


def before_trace(frame: Frame) -> tuple[bool, bool]:
    """A frame of a model is about to be traced; at its first call, the front is made here.

    Returns:
        Whether values may be symbols, and whether sizes that happen to be equal may differ in the next call.
    """
    for part in frame.model.children():  # compiled by itself before: inside this trace its hooks would end the graph
        part.apply(detach)
    front, inputs = Front.attach(frame.model), bound(frame.model, *frame.arguments)
    # Attached during this call, or called under torch.compiler.disable: not in turn.  It cannot wait either, for whoever has
    # the turn may be waiting to compile; then it is traced as it is.  Nor can it wait long for another model's readers, though it
    # would trace those: a call that ends without compiling ends soon, and one that waits to compile leaves them where they are.
    call = caller(*CALLBACKS)
    if not front.turn.is_mine() and front.turn.take(call, wait=False):
        front.call.early = front.prepare(frame.model, inputs, call, wait=PATIENCE)
        if not front.call.early:
            front.turn.give()
    # A front that has work says that the model takes images of any size, and texts of any length and number.
    varying = front.turn.is_mine() and (any(plan.sites for plan in front.plans.values()) or known_to_vary())
    if varying:
        handed = RUNNING.table[front.number] if front.active is not None else None
        front.call.marked.mark(inputs | visual_mask(frame.model) | left_behind(frame.model), handed)
    return front.call.capture, varying


def after_trace(model: nn.Module, failed: str) -> None:
    """The trace is done: ``failed`` says why it had to do without symbols."""
    front = attached(model)
    if front is not None:
        front.call.marked.clear()
        if failed:
            front.refuse(failed)
        if front.call.early:
            inputs = front.call.inputs
            front.clear()
            front.call.inputs = inputs  # the first call goes on, perhaps in parts that are compiled one by one
            front.call.early = False
            front.turn.give()


def attached(model: nn.Module) -> Front | None:
    """The front whose hooks ``model`` carries, if any."""
    return hook_owner(model, Front)


def bound(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    if not args:
        return dict(kwargs)
    signature = inspect.signature(model.forward)
    given = signature.bind_partial(*args, **kwargs).arguments
    for name, p in signature.parameters.items():
        if p.kind is p.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return dict(given)


def visual_mask(model: nn.Module) -> dict[str, Any]:
    """What a quantized model's hook found in front, as if it had been given."""
    context = modality.attached(model)
    return {} if context is None else {"the visual mask": context.visual}


def left_behind(model: nn.Module) -> dict[str, Any]:
    """What the last forward left on modules (``rope_deltas``), as if it had been given."""
    return {f"left {i}": vars(module)[name] for i, (module, name) in enumerate(left_on(model))}


def kind_of(inputs: Mapping[str, Any]) -> Kind:
    """What two calls must share to be prepared alike."""
    return tuple(sorted((name, v.dim()) for name, v in inputs.items() if isinstance(v, Tensor)))


def brings_features(inputs: Mapping[str, Any]) -> bool:
    """Whether the call has a floating-point input besides embeddings: only features come with metadata."""
    return any(
        isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1 and not name.endswith(("inputs_embeds", "mask"))
        for name, v in inputs.items()
    )
