"""What Dynamo asks of a model's layers before every step, asked once per call of ``generate``, while the device computes.

    guards of a layer    its modules, parameters, buffers and plain attributes are those that were traced, and its class has,
                         or has not, what was looked up there
    here                 the same objects in the same places, tensors of the same dtype, shape and device

Why:     Dynamo looks at some twenty things in every module before every call, so its time grows with depth, and all of it comes
         before the first kernel of a prompt and between two tokens.  Inside ``generate`` nothing changes the layers, so one look
         says what all of Dynamo's looks in it would; it is taken when the prompt is on the device, and if something has
         changed, the prompt is computed again.
Safe:    only guards on elements of module lists and on their classes are left out, only in a frame of the model itself, and only
         where an attribute is a constant, or is asked which object it is.  What is left out was compared by value; here objects
         are compared by identity, which is stricter.  When one differs, the model gets a new number, which is part of
         torch.compile's options: nothing that was compiled before is used again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor, nn

STATED = ("TYPE_MATCH", "ID_MATCH", "CLASS_MATCH")  # guards that identity answers for any object
KEY = "layers"  # of the number in torch.compile's options
ENOUGH = 4  # changes: a model that changes in every call of generate keeps all of Dynamo's guards
LAYER = re.compile(r"self((?:\._modules\['[^']+'\])*\._modules\['\d+'\](?:\._modules\['[^']+'\])*)(.*)")
STEP = re.compile(r"\._modules\['([^']+)'\]")
LEAF = re.compile(r"(?:\.(_parameters|_buffers)\['([^']+)'\]|\.(\w+)(\[\d+\])?)?")
# What Dynamo looks up in a class: an entry of its namespace, or a method as it is inherited; and the code of either.
CLASS = re.compile(
    r"(?:dict\()?type\((.+)\)\.__mro__\[(\d+)\](?:\.__dict__\)(?:\['([^']+)'\])?|\.(__call__))(\.fget)?(?:\.__code__)?"
)
CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
# What can change in a tensor that stays the same object: ``Module.to`` sets a parameter's ``data``.
FORM = attrgetter("dtype", "device", "shape")
TABLES = ("_parameters", "_buffers", "_modules")
ABSENT = object()
_numbers = itertools.count(1)


class LayerGuards:
    """The guards of one model that are left out of what is compiled, and what they asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.count = 0
        self.enough = ENOUGH
        self.renew()

    def renew(self) -> None:
        """Start afresh: ``options`` for torch.compile, none for a model that changes all the time."""
        self.count += 1
        self.number = next(_numbers)
        self.kinds: dict[int, tuple[nn.Module, type]] = {}
        self.tables: dict[int, tuple[Mapping[str, Any], tuple[Any, ...]]] = {}
        self.values: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        self.forms: dict[int, tuple[Tensor, Any]] = {}
        self.namespaces: dict[type, Any] = {}
        self.codes: dict[int, tuple[Any, Any]] = {}
        # A function, for transformers makes deep copies of options, and a copied method would bring a copied model.
        self.options: dict[str, Any] = {KEY: self.number, "guard_filter_fn": lambda guards: self.keep(guards)}
        if self.count > self.enough:
            self.options = {}

    def keep(self, guards: Sequence[Any]) -> list[bool]:
        """Which guards of one frame Dynamo keeps: ``guard_filter_fn`` of torch.compile."""
        frame = next((g.value for g in guards if g.has_value and g.name == "self"), None)
        if frame is not self.model:
            return [True] * len(guards)
        return [not self._take(g) for g in guards]

    def _take(self, guard: Any) -> bool:
        """Take over what this guard checks, if that can be checked here."""
        if (of_class := CLASS.fullmatch(guard.name)) is not None:
            return self._take_class(guard, *of_class.groups())
        found = LAYER.fullmatch(guard.name)
        leaf = found and LEAF.fullmatch(found[2])
        if not (found and leaf and guard.has_value):
            return False
        path = STEP.findall(found[1])
        table, name, attribute, index = leaf.groups()
        owner = self.model.get_submodule(".".join(path))
        if table is None and attribute is not None and attribute not in TABLES:
            value = vars(owner).get(attribute, ABSENT)
            stated = guard.guard_type in STATED and index is None
            if not (_constant(value) or stated) or (index is None and value is not guard.value):
                return False
        module = self._watch_path(path)
        for each in TABLES:
            self._watch(vars(module), each)
        if table is not None:
            value = self._watch(vars(module)[table], name)
            if isinstance(value, Tensor):
                self.forms[id(value)] = (value, FORM(value))
        elif attribute is not None:
            self._watch(vars(module), attribute)
        return True

    def _take_class(self, guard: Any, path: str, place: str, name: str | None, method: str | None, getter: str | None) -> bool:
        """Take over what it checks in the class of a layer, or in a base of it."""
        found = LAYER.fullmatch(path)
        if not found or found[2] or not guard.has_value:
            return False
        steps = STEP.findall(found[1])
        base = type(self.model.get_submodule(".".join(steps))).__mro__[int(place)]
        if name is None and method is None:
            name = _asked_for(guard)
        elif not (method or getter or _constant(guard.value) or guard.guard_type in STATED):
            return False
        if (key := name or method) is None:
            return False
        self._watch_path(steps)
        for each in base.__mro__ if method else (base,):
            found_there = self._watch(self.namespaces.setdefault(each, vars(each)), key)
            if found_there is not ABSENT:
                function = getattr(found_there, "fget", found_there)
                self.codes[id(function)] = (function, _code(function))
                break
        return True

    def _watch_path(self, path: Sequence[str]) -> nn.Module:
        """Remember the modules on the way to one, and its class."""
        module = self.model
        for step in path:
            module = self._watch(vars(module)["_modules"], step)
        self.kinds[id(module)] = (module, type(module))
        return module

    def _watch(self, place: Mapping[str, Any], name: str) -> Any:
        """Remember an entry of a namespace or of a table of a module, and which others there are."""
        self.tables.setdefault(id(place), (place, tuple(place.values())))
        return self.values.setdefault((id(place), name), (place, name, place.get(name, ABSENT)))[2]

    def same(self) -> bool:
        """Whether everything is as it was traced; loops in C, for thousands of entries."""
        if not self.values:
            return True
        modules, kinds = zip(*self.kinds.values(), strict=True)
        tensors, forms = zip(*self.forms.values(), strict=True) if self.forms else ((), ())
        functions, codes = zip(*self.codes.values(), strict=True) if self.codes else ((), ())
        alike = all(map(is_, map(type, modules), kinds)) and all(map(eq, map(FORM, tensors), forms))
        return (
            alike
            and all(map(is_, map(_code, functions), codes))
            and all(self._same_table(*table) for table in self.tables.values())
        )

    def _same_table(self, place: Mapping[str, Any], values: tuple[Any, ...]) -> bool:
        """Whether everything that was checked in it is unchanged; a module's size too, because an attribute may hide a method."""
        if len(place) == len(values):
            if all(map(is_, place.values(), values)):
                return True
        elif isinstance(place, dict):  # of a class all names that are not there were asked for
            return False
        watched = [(name, value) for other, name, value in self.values.values() if other is place]
        if not all(place.get(name, ABSENT) is value for name, value in watched):
            return False
        self.tables[id(place)] = (place, tuple(place.values()))
        return True


def _constant(value: Any) -> bool:
    """Whether to be the same object is to be the same."""
    return isinstance(value, CONSTANTS) or (isinstance(value, tuple) and all(isinstance(v, CONSTANTS) for v in value))


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _asked_for(guard: Any) -> str | None:
    """The name that a class has, or has not, by a guard on its namespace; None where that is not what it asks."""
    given = getattr(getattr(getattr(guard, "orig_guard", None), "create_fn", None), "keywords", None)
    key = (given or {}).get("key")
    return key if guard.guard_type == "DICT_CONTAINS" and isinstance(key, str) else None
