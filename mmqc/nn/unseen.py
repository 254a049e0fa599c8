"""What no recorded batch reached: the rewrites are proved on what was recorded, and the rest does not fit it any more.

    experts that nothing was routed to, between others that were      the streams that their siblings touch are left alone
    any other module that did not run (a tower, the end of a list)    a hook refuses to run it
    a parameter that its module, which ran, did not use               reading it as an attribute is refused

A text prompt alone, for example, reaches no vision tower: its features would enter a rotated stream unrotated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmqc.errors import MmqcError

# Without parameters, and the identity when a model is used: it does not matter whether they ran.
HARMLESS = (nn.Identity, nn.modules.dropout._DropoutNd)
HELD = (nn.ParameterList, nn.ParameterDict)
# Who may take hold of a parameter without computing with it.
KEEPERS = ("torch.", "accelerate.", "peft.", "mmqc.", "transformers.modeling_utils", "transformers.core_model_loading")
WHY = "no batch that this model was quantized with reached it, so it does not fit the streams around it, which were rewritten"
WHAT_TO_DO = "quantize the original model with batches that reach it"


class UnseenError(MmqcError, RuntimeError):
    """Something runs that no calibration batch reached: names it, and says what to do."""


@dataclass(frozen=True)
class Reached:
    """What a recording came by.

    Attributes:
        called: FQNs of the modules that ran.
        used: ids of the parameters and buffers that some operation read.
    """

    called: frozenset[str]
    used: frozenset[int]

    @classmethod
    def by(cls, called: Iterable[str], weights: Iterable[Tensor]) -> Reached:
        """By these modules and tensors."""
        return cls(frozenset(called), frozenset(map(id, weights)))

    def names(self, model: nn.Module) -> set[str]:
        """FQNs of the modules that ran or own something that was read, and of all that hold them."""
        own = (n for n, m in model.named_modules(remove_duplicate=False) if any(id(t) in self.used for t in _own(m)))
        return {name[:end] for name in (*self.called, *own) for end in _prefixes(name)}


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _prefixes(name: str) -> list[int]:
    return [0, len(name), *(i for i, c in enumerate(name) if c == ".")]


def _lists(model: nn.Module, reached: set[str]) -> Iterator[tuple[str, list[bool], list[nn.Module]]]:
    """Every list of like modules of which some ran and some before the last of these did not."""
    for name, module in model.named_modules():
        children = list(module.children()) if isinstance(module, nn.ModuleList) else []
        flags = [f"{name}.{i}".lstrip(".") in reached for i in range(len(children))]
        if flags != sorted(flags, reverse=True) and len({type(c) for c in children}) == 1:
            yield name, flags, children


def unsure_weights(model: nn.Module, reached: Reached) -> dict[str, str]:
    """Parameters that must stay as they are because a sibling of their module was not reached, and why."""
    found: dict[str, str] = {}
    for name, flags, children in _lists(model, reached.names(model)):
        missing = f"{name}.{flags.index(False)}".lstrip(".")
        for i, (flag, child) in enumerate(zip(flags, children, strict=True)):
            for parameter, _ in child.named_parameters() if flag else ():
                found[f"{name}.{i}.{parameter}".lstrip(".")] = f"no recorded batch reached {missing}, a sibling of its module"
    return found


def unseen(model: nn.Module, reached: Reached) -> list[str]:
    """FQNs of what was not reached, beside what ``unsure_weights`` provides for: modules, the outermost of each, and parameters."""
    names = reached.names(model)
    spared = {f"{n}.{i}".lstrip(".") for n, flags, _ in _lists(model, names) for i, flag in enumerate(flags) if not flag}
    return list(_unseen(model, "", names, reached, spared))


def unreached(model: nn.Module, reached: Reached) -> list[str]:
    """FQNs of all modules that did not run, siblings in lists included: another batch may reach them."""
    names = reached.names(model)
    return [n for n, m in model.named_modules() if n not in names and not isinstance(m, (*HARMLESS, *HELD, nn.ModuleList))]


def _unseen(module: nn.Module, name: str, names: set[str], reached: Reached, spared: set[str]) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    yield from (prefix + n for n, p in module.named_parameters(recurse=False) if id(p) not in reached.used)
    for child, part in module.named_children():
        fqn = prefix + child
        if fqn in spared or isinstance(part, HARMLESS):
            continue
        if fqn in names or isinstance(part, HELD):
            yield from _unseen(part, fqn, names, reached, spared)
        elif isinstance(part, nn.ModuleList | nn.ModuleDict | nn.Sequential) and not len(part):
            continue
        else:
            yield from (f"{fqn}.{i}" for i in range(len(part))) if isinstance(part, nn.ModuleList) else (fqn,)


def guard(model: nn.Module, names: Iterable[str]) -> None:
    """Make these modules refuse to run, and these parameters refuse to be read."""
    for name in names:
        owner, _, last = name.rpartition(".")
        holder = model.get_submodule(owner)
        if last in holder._parameters:
            _refuse_reading(holder, last, name)
        else:
            model.get_submodule(name).register_forward_pre_hook(functools.partial(_refuse, name))


def _refuse(name: str, module: nn.Module, args: Any) -> None:
    raise UnseenError(f"{name} ran, but {WHY}; {WHAT_TO_DO}")


def _refuse_reading(holder: nn.Module, parameter: str, name: str) -> None:
    """Give this one module a class in which the attribute raises; state dicts and moves do not go that way."""

    def read(self: nn.Module) -> Tensor | None:
        if _reader().startswith(KEEPERS):
            return self._parameters[parameter]
        raise UnseenError(f"the parameter {name} is read, but {WHY}; {WHAT_TO_DO}")

    def write(self: nn.Module, value: nn.Parameter | None) -> None:
        self._parameters[parameter] = value

    kind = type(holder)
    body = {parameter: property(read, write), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    holder.__class__ = type(kind.__name__, (kind,), body)


def _reader() -> str:
    """The file, as a module's name, in which the code that reads is; lists of parameters read for whoever indexes them."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "torch.nn.modules.container":
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")
