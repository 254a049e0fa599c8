"""What Dynamo asks of a model's layers before every step, asked once per call of ``generate``, while the device computes.

    guards of a layer    its modules, parameters, buffers and plain attributes are those that were traced
    here                 the same objects in the same places, tensors of the same dtype, shape and device

Why:     Dynamo looks at some twenty things in every module before every call, so its time grows with depth, and all of it comes
         before the first kernel of a prompt and between two tokens.  Inside ``generate`` nothing changes the layers, so one look
         says what all of Dynamo's looks in it would; it is taken when the prompt is on the device, and if something has
         changed, the prompt is computed again.
Safe:    only guards on elements of module lists are left out, only in a frame of the model itself, and only where an attribute
         is a constant, or is asked which object it is.  What is left out was compared by value; here objects are compared by
         identity, which is stricter.  When one differs, the model gets a new number, which is part of torch.compile's
         options: nothing that was compiled before is used again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor, nn

STATED = ("TYPE_MATCH", "ID_MATCH", "CLASS_MATCH")  # guards that identity answers for any object
KEY = "layers"  # of the number in torch.compile's options
ENOUGH = 4  # changes: a model that changes in every call of generate keeps all of Dynamo's guards
LAYER = re.compile(r"self((?:\._modules\['[^']+'\])*\._modules\['\d+'\](?:\._modules\['[^']+'\])*)(.*)")
STEP = re.compile(r"\._modules\['([^']+)'\]")
LEAF = re.compile(r"(?:\.(_parameters|_buffers)\['([^']+)'\]|\.(\w+))?")
CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
# What can change in a tensor that stays the same object: ``Module.to`` sets a parameter's ``data``.
FORM = attrgetter("dtype", "device", "shape")
TABLES = ("_parameters", "_buffers", "_modules")
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
        self.tables: dict[int, tuple[dict[str, Any], tuple[Any, ...]]] = {}
        self.values: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self.forms: dict[int, tuple[Tensor, Any]] = {}
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
        found = LAYER.fullmatch(guard.name)
        leaf = found and LEAF.fullmatch(found[2])
        if not (found and leaf and guard.has_value):
            return False
        module, path = self.model, STEP.findall(found[1])
        table, name, attribute = leaf.groups()
        owner = self.model.get_submodule(".".join(path))
        if table is None and attribute is not None and attribute not in TABLES:
            value = vars(owner).get(attribute, self)
            if value is not guard.value or not (isinstance(value, CONSTANTS) or guard.guard_type in STATED):
                return False
        for step in path:
            module = self._watch(module, "_modules", step)
        self.kinds[id(module)] = (module, type(module))
        for each in TABLES:
            self._watch(module, None, each)
        if table is not None:
            value = self._watch(module, table, name)
            if isinstance(value, Tensor):
                self.forms[id(value)] = (value, FORM(value))
        elif attribute is not None:
            self._watch(module, None, attribute)
        return True

    def _watch(self, module: nn.Module, table: str | None, name: str) -> Any:
        """Remember an attribute of a module, or an entry of one of its tables, and which others there are."""
        place = vars(module) if table is None else vars(module)[table]
        self.tables.setdefault(id(place), (place, tuple(place.values())))
        return self.values.setdefault((id(place), name), (place, name, place[name]))[2]

    def same(self) -> bool:
        """Whether everything is as it was traced; loops in C, for thousands of entries."""
        if not self.values:
            return True
        modules, kinds = zip(*self.kinds.values(), strict=True)
        tensors, forms = zip(*self.forms.values(), strict=True) if self.forms else ((), ())
        alike = all(map(is_, map(type, modules), kinds)) and all(map(eq, map(FORM, tensors), forms))
        return alike and all(self._same_table(*table) for table in self.tables.values())

    def _same_table(self, place: dict[str, Any], values: tuple[Any, ...]) -> bool:
        """Whether everything that was checked in it is unchanged; its size too, because an attribute may hide a method."""
        if len(place) != len(values):
            return False
        if all(map(is_, place.values(), values)):
            return True
        watched = [(name, value) for other, name, value in self.values.values() if other is place]
        if not all(place.get(name, self) is value for name, value in watched):
            return False
        self.tables[id(place)] = (place, tuple(place.values()))
        return True
