"""What lies inside a rewritten model is in other coordinates than the original's: right for its other parts, for nobody else.

``output_hidden_states=True`` is refused; what newer versions of transformers return of encoders (``image_outputs``) is left out.
A module that is called by itself, outside the model's forward and ``generate`` (the base model for its ``last_hidden_state``, a
tower by ``get_image_features``), gives an ``InsideWarning``.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from mmqc.errors import MmqcError
from mmqc.traced import is_traced
from mmqc.versions import without_encoders

STATES = "output_hidden_states"
OTHER = "was rewritten (its channels are rotated, scaled or permuted; what reads them undoes it)"
WHAT_TO_DO = "take them from the original model, or quantize with rewrites that leave the stream alone (rewrites=mmqc.Rewrites())"


class InsideError(MmqcError, ValueError):
    """Values are asked for that the rewrites changed: says which, and where else to find them."""


class InsideWarning(UserWarning):
    """A module of a rewritten model runs by itself, and gives what only the rest of the model understands."""


def outward(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose outputs somebody may want, by FQN: those that hold others, through lists and no deeper than their members."""
    waiting = list(model.named_children())
    for name, module in waiting:
        members = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if not members and any(True for _ in module.children()):
            yield name, module
        if members or not _in_list(model, name):
            waiting += [(f"{name}.{child}", part) for child, part in module.named_children()]


def _in_list(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList | nn.ModuleDict)


def watch(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse hidden states, and warn where one of these modules runs by itself; ``names`` are those whose outputs were changed."""
    names = list(names)
    if names:
        model.register_forward_pre_hook(functools.partial(_refuse_states, names[0]), with_kwargs=True)
        model.register_forward_hook(_leave_out_encoders)
    for name in names:
        if not _in_list(model, name):
            model.get_submodule(name).register_forward_pre_hook(functools.partial(_warn_alone, name))


def _refuse_states(name: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    del args
    asked = kwargs.get(STATES)
    if asked or (asked is None and getattr(getattr(module, "config", None), STATES, False)):
        given = f"the stream that {name} gives {OTHER}"
        raise InsideError(f"{STATES}: {given}, so hidden states are not the original model's; {WHAT_TO_DO}")


def _leave_out_encoders(module: nn.Module, args: Any, output: Any) -> Any:
    del module, args
    return without_encoders(output)


def _warn_alone(name: str, module: nn.Module, args: Any) -> None:
    del module, args
    if is_traced() or _within():
        return
    text = f"{name} runs by itself: the stream that it gives {OTHER}. For the original model's values, {WHAT_TO_DO}"
    warnings.warn(text, InsideWarning, stacklevel=4)


def _within() -> bool:
    """Whether a module around this one is at work: its forward (or a part of it, compiled) or ``generate`` is on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_name
        if (name == "generate" or "forward" in name) and _is_watched(frame.f_locals.get("self")):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _is_watched(module: Any) -> bool:
    hooks = module._forward_pre_hooks.values() if isinstance(module, nn.Module) else ()
    return any(getattr(hook, "func", None) in (_refuse_states, _warn_alone) for hook in hooks)
