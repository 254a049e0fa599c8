"""Hand results over from the eager front to the traced region: a function is replaced by a reader of what it returned.

    in front    values[site] = [f(*args) for each recorded call]          args: inputs of this call, by name
    traced      f(...)  ->  values[site][k],   k = how often the site was reached in this call

A reader is in place only while a prepared model runs, and outside a traced region it calls the function that it stands for.
What readers read is in a global table, by the number of the front: Dynamo would take a number that it reaches through a module
for a constant and compile anew for each.  Every thread has a table of its own.
"""

from __future__ import annotations

import inspect
import itertools
import math
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mmqc.front import provenance
from mmqc.front.numbers import Numbers
from mmqc.front.places import Call, Owner, place_of, plain
from mmqc.front.provenance import leaves
from mmqc.traced import is_traced

numbers = itertools.count()


@dataclass
class Handed:
    """The results for one call of the model, per site and in order, and how many were read."""

    values: list[list[Any]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    arguments: list[Any] = field(default_factory=list)


class _Running(threading.local):
    def __init__(self) -> None:
        self.table: dict[int, Handed] = {}


RUNNING = _Running()


def handed_over() -> set[int]:
    """The ids of the tensors that the calls in progress are given beside their own."""
    given = (part for handed in RUNNING.table.values() for part in (handed.values, handed.arguments))
    return {id(leaf) for part in given for leaf in pytree.tree_leaves(part) if isinstance(leaf, Tensor)}


@dataclass
class ValueSite:
    """A function whose results are handed over, and the arguments of its calls.

    Attributes:
        calls: recipes of the arguments (provenance.py), by name.
        as_numbers: integer tensors among the results are handed over as numbers.
    """

    owner: Owner
    name: str
    function: Callable[..., Any]
    calls: list[dict[str, Any]]
    as_numbers: bool = False

    def compute(self, inputs: Mapping[str, Any], known: dict[int, Any] | None = None) -> list[Any]:
        """The results for these inputs; ``known`` holds what other sites have computed for them."""
        known = {} if known is None else known
        results = [provenance.call(self.function, arguments, inputs, known) for arguments in self.calls]
        return pytree.tree_map(_numbers, results) if self.as_numbers else results

    def reader(self, number: int, index: int) -> Any:
        """What stands in the function's place."""
        function = self.function

        def read(*args: Any, **kwargs: Any) -> Any:
            if is_traced() and number in RUNNING.table:
                handed = RUNNING.table[number]
                k = handed.taken[index]
                if k < len(handed.values[index]):
                    handed.taken[index] = k + 1
                    return handed.values[index][k]
            return function(*args, **kwargs)

        return read

    def __str__(self) -> str:
        names = sorted({leaf.name for call in self.calls for leaf in leaves(call)})
        return f"{self.name}({', '.join(names)}){' as numbers' if self.as_numbers else ''}"


def _numbers(value: Any) -> Any:
    whole = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool and value.dim() in (1, 2)
    return Numbers.of(value) if whole else value


@dataclass
class ArgumentSite:
    """A method that gets another form of inputs: Python numbers, or one row in place of many.

    Forms:
        list     the tensor as nested lists: what the method reads are numbers that Dynamo knows, and may vary
        numbers  the same, where the method reckons with them or asks for them by ``tolist``
        one row  [[1, ..., sum of the rows' products, ..., 1]]: for methods to which only the total matters

    Attributes:
        sources: the inputs' names, by those of the arguments.
    """

    owner: nn.Module
    name: str
    function: Callable[..., Any]
    sources: Mapping[str, str]
    form: str
    column: int = -1

    def compute(self, inputs: Mapping[str, Any], known: dict[int, Any] | None = None) -> list[Any]:
        """The arguments for these inputs."""
        del known
        return [self._form(inputs[source]) for source in self.sources.values()]

    def _form(self, tensor: Tensor) -> Any:
        if self.form == "list":
            return tensor.tolist()
        if self.form == "numbers":
            return Numbers.of(tensor)
        row = torch.ones_like(tensor[:1])
        row[0, self.column] = tensor.prod(-1).sum()
        return row

    def reader(self, number: int, index: int) -> Any:
        """What stands in the method's place."""
        function = self.function
        parameters = list(inspect.signature(function).parameters)
        places = [(argument, parameters.index(argument)) for argument in self.sources]

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_traced() and number in RUNNING.table:
                for (argument, position), handed in zip(places, RUNNING.table[number].arguments[index], strict=True):
                    if argument in kwargs or position >= len(args):
                        kwargs = {**kwargs, argument: handed}
                    else:
                        args = (*args[:position], handed, *args[position + 1 :])
            return function(*args, **kwargs)

        return types.MethodType(call, self.owner)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.sources.values())} as {self.form})"


Site = ValueSite | ArgumentSite


def compute(number: int, sites: list[Site], inputs: Mapping[str, Any]) -> None:
    """Fill the table for one call."""
    handed, known = Handed(), dict[int, Any]()
    for site in sites:
        value = site.compute(inputs, known)
        handed.values.append(value if isinstance(site, ValueSite) else [])
        handed.arguments.append(None if isinstance(site, ValueSite) else value)
        handed.taken.append(0)
    RUNNING.table[number] = handed


_numpy_prod = numpy.prod


def shape_product(a: Any, *args: Any, **kwargs: Any) -> Any:
    """``numpy.prod``; Dynamo takes its result for a value that it does not know, even where ``a`` is a shape."""
    is_shape = isinstance(a, tuple) and not args and not kwargs
    if is_shape and (torch.compiler.is_dynamo_compiling() or any(type(n) is not int for n in a)):
        return math.prod(a)
    return _numpy_prod(a, *args, **kwargs)


class _ShapeProducts:
    """``shape_product`` in numpy's place while any front of the process needs it there; other threads see no difference."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: weakref.WeakSet[Installed] = weakref.WeakSet()

    def hold(self, holder: Installed) -> None:
        with self.lock:
            self.holders.add(holder)
            setattr(numpy, "prod", shape_product)  # noqa: B010  (numpy's own type is another)

    def release(self, holder: Installed) -> None:
        with self.lock:
            self.holders.discard(holder)
            if not self.holders:
                setattr(numpy, "prod", _numpy_prod)  # noqa: B010


SHAPE_PRODUCTS = _ShapeProducts()


class Installed:
    """Readers in their places; ``remove`` puts back what was there.

    Attributes:
        shared: whether some are among the globals of a Python module, where all models of a class look functions up.
    """

    def __init__(self, number: int, sites: list[Site]) -> None:
        self.undo: list[tuple[dict[str, Any], str, Any, bool]] = []
        self.places = []
        self.shared = any(isinstance(site.owner, dict) for site in sites)
        for index, site in enumerate(sites):
            reader: Any = site.reader(number, index)
            function: Any = reader.__func__ if isinstance(reader, types.MethodType) else reader
            function.mmqc_stands_for = site.function
            self.places.append((site.owner if isinstance(site.owner, dict) else site.owner.__dict__, site.name, reader))

    def put(self) -> None:
        """Put the readers in."""
        if self.undo:
            return
        for place, name, reader in self.places:
            self.undo.append((place, name, plain(place[name]) if name in place else None, name in place))
            place[name] = reader
        SHAPE_PRODUCTS.hold(self)

    def remove(self) -> None:
        """Take them out again."""
        for place, name, before, present in reversed(self.undo):
            if present:
                place[name] = before
            else:
                place.pop(name, None)
        self.undo.clear()
        SHAPE_PRODUCTS.release(self)


def value_sites(calls: list[Call]) -> list[ValueSite]:
    """One site for each function among ``calls`` that can be replaced where it is looked up."""
    found: dict[tuple[int, str], ValueSite] = {}
    for call in calls:
        place = place_of(call)
        if place is None:
            continue
        owner, function = place
        site = found.setdefault((id(owner), call.code.co_name), ValueSite(owner, call.code.co_name, function, []))
        site.calls.append(call.recipe or {})
    return list(found.values())
