"""Tensors that were tied and no longer are, as of a head that was rotated: what keeps transformers from tying them again.

A model's own list of ties is emptied, here and whenever a checkpoint of it is loaded.  Other readers of the checkpoint know
``tie_word_embeddings`` of config.json alone, so that is set to false, too, except where a model computes by it: T5 and its
kin scale the hidden states in front of a tied head, or take a false for another version of the architecture.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

FLAG = "tie_word_embeddings"


def untie(model: PreTrainedModel) -> bool:
    """Declares a model untied if a tensor that it ties is no longer shared; otherwise changes nothing.

    The flag is one for all ties, so those that still hold get a copy of their own.
    """
    state = model.state_dict(keep_vars=True)
    ties = {target: source for target, source in model.all_tied_weights_keys.items() if {target, source} & set(state)}
    broken = [target for target, source in ties.items() if state.get(target) is not state.get(source)]
    if not broken:
        return False
    for target in set(ties) - set(broken):
        path, _, name = target.rpartition(".")
        model.get_submodule(path).register_parameter(name, nn.Parameter(state[target].detach().clone()))
    forget_ties(model)
    if not computes_by_flag(model):
        _set_untied(model.config)
    return True


def forget_ties(model: PreTrainedModel) -> None:
    """Lets transformers tie nothing of a model, whatever its configs say."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.all_tied_weights_keys = {}
            module._tied_weights_keys = {}


def computes_by_flag(model: PreTrainedModel) -> bool:
    """Whether a model would compute, or be built, otherwise if its configs said that nothing is tied."""
    flagged, read = copy.deepcopy(model.config), _read(model.config)
    for config in (flagged, read):
        _set_untied(config)
    if _read(flagged).to_dict() != read.to_dict():
        return True
    return any(_reads_flag(cls) for cls in {type(m) for m in model.modules() if isinstance(m, PreTrainedModel)})


def _read(config: Any) -> Any:
    """A config as it comes from its file."""
    return type(config).from_dict(config.to_dict())


def _reads_flag(cls: type) -> bool:
    """Whether ``forward``, or something of the same file that it calls, reads the flag."""
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        function = inspect.unwrap(_found(cls, waiting.pop()))
        if not isinstance(function, FunctionType):
            continue
        used = set(_names(function.__code__))
        if FLAG in used:
            return True
        waiting += sorted(used - seen)
        seen |= used
    return False


def _found(cls: type, name: str) -> Any:
    """A method of the class, or a function of its file; what transformers gives to every model is not looked at."""
    own = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    if own is None or name in vars(PreTrainedModel):
        own = getattr(sys.modules.get(cls.__module__), name, None)
    return getattr(own, "__func__", getattr(own, "fget", own))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from (name for name in code.co_consts if isinstance(name, str) and name.isidentifier())  # of getattr
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _set_untied(config: Any) -> None:
    if hasattr(config, FLAG):
        setattr(config, FLAG, False)
    for name in getattr(config, "sub_configs", {}):
        if (nested := getattr(config, name, None)) is not None:
            _set_untied(nested)
