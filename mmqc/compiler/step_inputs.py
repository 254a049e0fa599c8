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

from mmqc.compiler.step_mask import is_mask_of_loop, next_mask

PREPARE = "prepare_inputs_for_generation"
UPDATE = "_update_model_kwargs_for_generation"
TOKENS = "input_ids"


class Rules(NamedTuple):
    """Names of a step's inputs by how they differ from the last step's; all others are the same."""

    rising: tuple[str, ...]  # one more everywhere: positions
    growing: tuple[str, ...]  # [..., n], then [..., n + 1] with a zero at the end: kinds of tokens


class _Steps:
    """The inputs of one loop's steps: transformers' own until they are known to go on."""

    def __init__(self, prepare: Callable[..., Any], update: Callable[..., Any], known: set[Rules], most: int) -> None:
        self.original_prepare, self.original_update, self.known, self.most = prepare, update, known, most
        self.owner = threading.get_ident()
        self.last: dict[str, Any] = {}
        self.rules: Rules | None = None
        self.room: dict[str, Tensor] = {}  # what grows, with zeros to its end

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

    def _next(self, input_ids: Tensor, rules: Rules) -> dict[str, Any]:
        next_mask()
        self.last[TOKENS] = input_ids[:, -1:].clone(memory_format=torch.contiguous_format)
        for name in rules.rising:
            self.last[name] = self.last[name] + 1  # another tensor: whoever kept the last one's sees it as it was
        for name in rules.growing:
            length = self.last[name].shape[-1] + 1
            if name not in self.room:
                self.room[name] = nn.functional.pad(self.last[name], (0, max(self.most, length) - length + 1))
            self.last[name] = _first(self.room[name], length)
        return dict(self.last)


def _first(room: Tensor, length: int) -> Tensor:
    """[..., n] of what is longer; of one row, contiguous, as ``cat`` gives it."""
    one_row = room.numel() == room.shape[-1]
    return room.flatten()[:length].view(*room.shape[:-1], length) if one_row else room[..., :length]


@contextmanager
def inputs_go_on(model: Any, known: set[Rules], most: int) -> Iterator[None]:
    """The steps of this thread's loop, inside ``masks_go_on``, go on with the last one's inputs.

    Args:
        model: the model that generates.
        known: how inputs of this model were seen to go on: added to, so that values are compared once.
        most: tokens that a sequence may have at the end.
    """
    update: Any = getattr(type(model), UPDATE, None)
    if update is not getattr(generation.GenerationMixin, UPDATE, None) or UPDATE in vars(model) or PREPARE in vars(model):
        yield
        return
    steps = _Steps(getattr(model, PREPARE), getattr(model, UPDATE), known, most)
    # Of the instance: neither another model nor a copy of this one has them.
    object.__setattr__(model, PREPARE, steps.prepare)
    object.__setattr__(model, UPDATE, steps.update)
    try:
        yield
    finally:
        object.__delattr__(model, PREPARE)
        object.__delattr__(model, UPDATE)


def how_it_goes_on(last: Mapping[str, Any], made: Mapping[str, Any], known: set[Rules]) -> Rules | None:
    """How a step's inputs follow from the last step's; None if something moves in another way.

    Args:
        last: a step's inputs.
        made: the next step's.
        known: rules for which values were compared before.
    """
    if last.keys() != made.keys():
        return None
    rising, growing = [], []
    for name, value in made.items():
        before = last[name]
        if name == TOKENS or value is before or is_mask_of_loop(value):
            continue
        if isinstance(value, Tensor) and isinstance(before, Tensor) and value.dtype in (torch.int64, torch.int32):
            (rising if value.shape == before.shape else growing).append(name)
        elif not (type(value) is type(before) and isinstance(value, int | float | str) and value == before):
            return None
    rules = Rules(tuple(rising), tuple(growing))
    if rules not in known:  # look at the values, which waits for the device
        if not all(torch.equal(made[name], last[name] + 1) for name in rising):
            return None
        if not all(torch.equal(made[name], nn.functional.pad(last[name], (0, 1))) for name in growing):
            return None
        known.add(rules)
    return rules
