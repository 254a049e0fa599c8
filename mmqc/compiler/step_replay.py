"""A whole step of the loop is one launch: recorded with what Dynamo and transformers do around its graph, and replayed.

    1st, 2nd step   transformers prepares the inputs, and how they go on is learnt (step_inputs.py)
    3rd             its inputs lie in memory that the model keeps; what its graph is called with is noted
    4th             if nothing but the values in that memory differs, the call is recorded; and replayed
    later           the values change, one launch
    another call    is replayed from its 4th step on, if the graph of the 3rd was called with what was recorded

Why:     between two tokens the host asks Dynamo's guards, compares the addresses of a thousand tensors and wraps what comes out:
         some tenths of a millisecond, longer than the device is busy where GPUs share a model.
Exact:   the graph is the same program with the same arguments at the same addresses, its numbers too.  Everything that changes
         from step to step is in tensors, and they are where the recording reads them.
Not:     steps of several graphs, or of graphs without CUDA graphs; outputs that are collected, such as hidden states; hooks that
         are neither of torch, transformers nor mmqc, for a replay does not call them; inputs that go on in another way; caches
         with states of linear attention.
Memory:  what a step needs beside the model and its cache, in one pool for the ``LIMIT`` recordings that were used last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.compiler.cuda_recorder import Cuda, Replay
from mmqc.compiler.dense import dense
from mmqc.compiler.recorded_sizes import Device, place_for
from mmqc.compiler.stamp import addresses
from mmqc.front.front import visual_mask
from mmqc.front.handover import handed_over

__all__ = ["Steady", "StepReplays", "noted"]

TOKENS = "input_ids"
OTHERS = "its graph is called with something else, or has no CUDA graphs"
LIMIT = 4
UNUSED = 4  # recordings that no other call could use: what they read lies elsewhere in every call
KNOWN = {"torch", "transformers", "accelerate", "mmqc"}  # whose hooks compute, and do nothing else

Call = tuple[Any, tuple[int, ...], tuple[Any, ...]]  # a graph, the addresses of its tensors, its numbers
_noted: ContextVar[tuple[nn.Module, list[Call]] | None] = ContextVar("what graphs of a model are called with", default=None)


def noted(graph: Callable[..., Any], recordable: bool) -> Callable[..., Any]:
    """``graph``, which says what it is called with while a step asks; ``recordable``: it has CUDA graphs of Inductor's."""

    def call(*args: Any) -> Any:
        if (asked := _noted.get()) is not None:
            model, calls = asked
            calls.append(_call_of(call if recordable else object(), args, _made_in_front(model)))
        return graph(*args)

    return call


def _made_in_front(model: nn.Module) -> set[int]:
    """The ids of the tensors that this call's hooks made for the graph: they are made anew in a recording, too."""
    return handed_over().union(map(id, visual_mask(model).values()))


def _call_of(graph: object, args: Sequence[Any], made: set[int]) -> Call:
    """What makes two calls the same but for values in memory; with an object of its own where that cannot be said."""
    tensors = [a for a in args if isinstance(a, Tensor) and id(a) not in made]
    numbers: list[Any] = [a for a in args if not isinstance(a, Tensor)]
    elsewhere = {t.device for t in tensors if t.device.type != "cpu"}  # then values on the CPU are numbers to a recording
    if len(elsewhere) > 1:  # only one device's launches would be recorded
        numbers.append(object())
    for tensor in tensors:
        away = bool(elsewhere) and tensor.device.type == "cpu"
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or (away and tensor.dim()):
            numbers.append(object())
        elif away:
            numbers.append(tensor.item())
    return graph, tuple(addresses(tensors)), tuple(numbers)


@contextmanager
def _noting(model: nn.Module) -> Iterator[list[Call]]:
    calls: list[Call] = []
    token = _noted.set((model, calls))
    try:
        yield calls
    finally:
        _noted.reset(token)


@dataclass
class _Kept:
    """Memory of a step's inputs, and the step that was recorded on it.

    Attributes:
        slots: by input.
        calls: what its graph was called with.
        outputs: the fields of what the model gives, but for the cache.
        unused: recordings since one was used by another call.
        refused: why there is none.
    """

    slots: dict[str, Any]
    calls: list[Call] = field(default_factory=list)
    kind: Any = None
    outputs: dict[str, Any] = field(default_factory=dict)
    replay: Replay | None = None
    unused: int = 0
    refused: str = ""


class StepReplays:
    """What a model keeps of its steps from one call of ``generate`` to the next."""

    def __init__(self, device: Device | None = None) -> None:
        self.device: Device = device or Cuda()
        self.kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self.replays = 0

    def begin(self, model: Any, inputs: dict[str, Any], growing: Iterable[str]) -> Steady | None:
        """The steps from one with these inputs on, which now lie in kept memory; None where steps are not recorded.

        Args:
            model: whose steps they are.
            inputs: of the third step; what lies in kept memory takes its place.
            growing: names of those whose size changes.
        """
        places = {n: v for n, v in inputs.items() if n not in growing and _movable(v, self.device.kind)}
        key = (*((n, *map(_form, _tensors(v))) for n, v in places.items()), torch.is_inference_mode_enabled())
        kept = self.kept.get(key)
        if torch.is_grad_enabled() or (kept is not None and kept.refused) or (kept is None and not places):
            return None
        if kept is None:
            kept = self.kept[key] = _Kept({n: _like(v) for n, v in places.items()})
        self.kept.move_to_end(key)
        while len(self.kept) > LIMIT:
            self.kept.popitem(last=False)
        for name, value in places.items():
            for slot, tensor in zip(_tensors(kept.slots[name]), _tensors(value), strict=True):
                dense(slot).copy_(dense(tensor))
            inputs[name] = kept.slots[name]
        return Steady(self, model, kept)

    def refusals(self) -> list[str]:
        """Why steps are not recorded."""
        return sorted({kept.refused for kept in self.kept.values() if kept.refused})


class Steady:
    """The steps of one call of ``generate``, from the third on."""

    def __init__(self, replays: StepReplays, model: nn.Module, kept: _Kept) -> None:
        self.replays, self.model, self.kept = replays, model, kept
        self.seen: list[Call] | None = None
        self.output: Any = None

    def go_on(self, input_ids: Tensor, inputs: Mapping[str, Any], rising: Iterable[str]) -> None:
        """The next step's values: the token behind ``input_ids``, and one more in what rises."""
        inputs[TOKENS].copy_(input_ids[:, -1:])
        for name in rising:
            dense(inputs[name]).add_(1)

    @property
    def replaying(self) -> bool:
        """Whether the next step needs nothing but values in its slots."""
        return self.output is not None

    def run(self, call: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """A step: ``call``, the compiled forward, with its inputs, or what does the same."""
        if self.output is not None:
            return self._replay()
        if self.kept.refused:
            return call(**inputs)
        if self.seen is None:
            with _noting(self.model) as self.seen:
                output = call(**inputs)
            if self.kept.replay is not None and self.kept.calls == self.seen:
                self.kept.unused = 0
                self.output = self._output(output)
            return output
        self._record(call, inputs)
        return call(**inputs) if self.output is None else self._replay()

    def _replay(self) -> Any:
        self.replays.replays += 1
        assert self.kept.replay is not None
        self.kept.replay()
        return self.output

    def _record(self, call: Callable[..., Any], inputs: dict[str, Any]) -> None:
        from mmqc.lowering.plain_calls import plain_calls

        kept = self.kept
        if theirs := _hook_of_others(self.model):
            kept.refused = f"it would not call the hook {theirs}"
            return
        try:
            with _noting(self.model) as calls, plain_calls():
                output, replay = self.replays.device.record(lambda: call(**inputs))
        except RuntimeError as error:  # out of memory, or what a capture does not allow
            kept.refused = str(error).partition("\n")[0]
            return
        if len(calls) != 1 or calls != self.seen:
            kept.refused = f"a step calls {len(calls)} graphs" if len(calls) != 1 else OTHERS
            return
        fields = {n: v for n, v in output.items() if n not in inputs or v is not inputs[n]}  # not the cache: it may be let go
        if not all(isinstance(v, Tensor) for v in fields.values()):
            kept.refused = "the model gives more than tensors and its cache"
            return
        kept.unused += 1
        if kept.unused > UNUSED:
            kept.refused = "what it reads lies elsewhere in every call"
        kept.calls, kept.kind, kept.outputs, kept.replay = calls, type(output), fields, replay
        self.output = output

    def _output(self, output: Any) -> Any:
        """What a replay gives in this call: the recorded tensors, and this call's cache."""
        return self.kept.kind(**{**output, **self.kept.outputs})


def _tensors(value: Any) -> list[Tensor]:
    return list(value.values()) if isinstance(value, dict) else [value]


def _movable(value: Any, device: str) -> bool:
    """Whether it is a tensor of the device, or some by name, as masks are by kind of layer."""
    tensors = _tensors(value)
    return bool(tensors) and all(type(t) is Tensor and t.device.type == device for t in tensors)


def _form(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _like(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _like(v) for name, v in value.items()}
    return place_for(value)


def _hook_of_others(model: nn.Module) -> str:
    """The first hook that may do more than compute; "" if there is none."""
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if str(getattr(hook, "__module__", "")).partition(".")[0] not in KNOWN:
                return getattr(hook, "__qualname__", repr(hook))
    return ""
