"""A step's inputs are the last step's, one token further, where transformers makes them all anew in front of every step.

    transformers    attention_mask, position_ids, mm_token_type_ids  ── cat, slice, clone, ... ──►  inputs of the step
    here            the last step's inputs  ── position + 1, the mask's next column, the new token ──►  the same

Why:     each of those operations is a launch of its own between two CUDA graphs: some thirty, a tenth of a millisecond and more.
Exact:   only after two steps that transformers prepared itself, of which the second's inputs were the first's one token further,
         value by value; how they go on is then decided by ``GenerationMixin``'s own update, which adds one to positions.
Not:     models with an update of their own; inputs that move in another way; masks that do not go on (step_mask.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.generation import utils as generation

from mmqc.compiler.step_mask import is_mask_of_loop, mask_lies_in, next_mask
from mmqc.compiler.step_replay import TOKENS, Steady, StepReplays

PREPARE = "prepare_inputs_for_generation"
UPDATE = "_update_model_kwargs_for_generation"
COMPILED = "get_compiled_call"


class Rules(NamedTuple):
    """Names of a step's inputs by how they differ from the last step's; all others are the same."""

    rising: tuple[str, ...]  # one more everywhere: positions
    growing: tuple[str, ...]  # [..., n], then [..., n + 1] with a zero at the end: kinds of tokens
    zeros: tuple[str, ...] = ()  # of the new token alone, made anew and zero again: its kind


class _Steps:
    """The inputs of one loop's steps: transformers' own until they are known to go on."""

    def __init__(self, model: Any, known: set[Rules], most: int, replays: StepReplays | None) -> None:
        self.original_prepare, self.original_update = getattr(model, PREPARE), getattr(model, UPDATE)
        self.original_compiled = getattr(model, COMPILED)
        self.model, self.known, self.most, self.replays = model, known, most, replays
        self.owner = threading.get_ident()
        self.last: dict[str, Any] = {}
        self.rules: Rules | None = None
        self.room: dict[str, Tensor] = {}  # what grows, with zeros to its end
        self.steady: Steady | None = None

    def prepare(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of the model's method, for the thread that runs the loop."""
        if threading.get_ident() != self.owner:
            return self.original_prepare(input_ids, *args, **kwargs)
        if self.rules is not None:
            return self._next(input_ids, self.rules)
        made = self.original_prepare(input_ids, *args, **kwargs)
        one = isinstance(made, dict) and isinstance(made.get(TOKENS), Tensor) and made[TOKENS].shape == (input_ids.shape[0], 1)
        if one and self.last:
            self.rules = how_it_goes_on(self.last, made, self.known)
        self.last = dict(made) if one else {}
        return made

    def update(self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """In place of transformers' method: what nothing reads any more is not made longer."""
        if self.rules is not None and threading.get_ident() == self.owner:
            return model_kwargs
        return self.original_update(outputs, model_kwargs, *args, **kwargs)

    def compiled(self, config: Any) -> Callable[..., Any]:
        """In place of transformers' method: the compiled forward, or a recording of all of it."""
        call = self.original_compiled(config)
        if threading.get_ident() != self.owner:
            return call
        return lambda **inputs: call(**inputs) if self.steady is None else self.steady.run(call, inputs)

    def _next(self, input_ids: Tensor, rules: Rules) -> dict[str, Any]:
        next_mask()
        if self.steady is not None:
            self.steady.go_on(input_ids, self.last, rules.rising)
            if self.steady.replaying:
                return self.last
        else:
            self.last[TOKENS] = input_ids[:, -1:].clone(memory_format=torch.contiguous_format)
            for name in rules.rising:
                self.last[name] = self.last[name] + 1  # another tensor: whoever kept the last one's sees it as it was
        for name in rules.growing:
            length = self.last[name].shape[-1] + 1
            if name not in self.room:
                self.room[name] = nn.functional.pad(self.last[name], (0, max(self.most, length) - length + 1))
            self.last[name] = _first(self.room[name], length)
        if self.replays is not None:
            self._begin(self.replays, rules)
        return dict(self.last)

    def _begin(self, replays: StepReplays, rules: Rules) -> None:
        """The first time that inputs go on."""
        self.replays = None
        masks = [name for name, value in self.last.items() if is_mask_of_loop(value)]
        self.steady = replays.begin(self.model, self.last, rules.growing)
        for name in masks:
            mask_lies_in(self.last[name])


def _first(room: Tensor, length: int) -> Tensor:
    """[..., n] of what is longer; of one row, contiguous, as ``cat`` gives it."""
    one_row = room.numel() == room.shape[-1]
    return room.flatten()[:length].view(*room.shape[:-1], length) if one_row else room[..., :length]


@contextmanager
def inputs_go_on(model: Any, known: set[Rules], most: int, replays: StepReplays | None = None) -> Iterator[None]:
    """The steps of this thread's loop, inside ``masks_go_on``, go on with the last one's inputs.

    Args:
        model: the model that generates.
        known: how inputs of this model were seen to go on: added to, so that values are compared once.
        most: tokens that a sequence may have at the end.
        replays: where steps that go on are recorded; None: they are not.
    """
    update: Any = getattr(type(model), UPDATE, None)
    if update is not getattr(generation.GenerationMixin, UPDATE, None) or UPDATE in vars(model) or PREPARE in vars(model):
        yield
        return
    steps = _Steps(model, known, most, replays)
    ours = {PREPARE: steps.prepare, UPDATE: steps.update, **({COMPILED: steps.compiled} if replays is not None else {})}
    for name, method in ours.items():  # of the instance: neither another model nor a copy of this one has them
        object.__setattr__(model, name, method)
    try:
        yield
    finally:
        for name in ours:
            object.__delattr__(model, name)


def how_it_goes_on(last: Mapping[str, Any], made: Mapping[str, Any], known: set[Rules]) -> Rules | None:
    """How a step's inputs follow from the last step's; None if something moves in another way.

    Args:
        last: a step's inputs.
        made: the next step's.
        known: rules for which values were compared before.
    """
    if last.keys() != made.keys():
        return None
    of_one_shape, growing = [], []
    for name, value in made.items():
        before = last[name]
        if name == TOKENS or value is before or is_mask_of_loop(value):
            continue
        if isinstance(value, Tensor) and isinstance(before, Tensor) and value.dtype in (torch.int64, torch.int32):
            (of_one_shape if value.shape == before.shape else growing).append(name)
        elif not (type(value) is type(before) and isinstance(value, int | float | str) and value == before):
            return None
    seen = [r for r in known if {*r.rising, *r.zeros} == {*of_one_shape} and {*r.growing} == {*growing}]
    if len(seen) == 1:
        return seen[0]
    # Not seen before, or in two ways: look at the values, which waits for the device.
    zeros = [name for name in of_one_shape if not (made[name].any() or last[name].any())]
    rising = [name for name in of_one_shape if name not in zeros]
    if not all(torch.equal(made[name], last[name] + 1) for name in rising):
        return None
    if not all(torch.equal(made[name], nn.functional.pad(last[name], (0, 1))) for name in growing):
        return None
    rules = Rules(tuple(rising), tuple(growing), tuple(zeros))
    known.add(rules)
    return rules
