"""What the tensors of a watched forward were made of, where that is inputs of it and nothing else.

    lengths = mask.sum(-1)                          Operation(sum, (Input("mask"), -1))
    padded, chunks = chunked(features, lengths)     Part(Returned(chunked, {"features": Input("features"), "lengths": ...}), 1)
    positions(chunks)                               can be computed in front of the forward, from its inputs

A recipe is such an expression, in nested containers: everything in it that is no tensor is what it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmqc.front.places import Call, place_of

LARGER = 4  # times the largest input may a tensor be whose recipe is kept: it is alive as long as the forward is watched
UNSAID = ("rand", "empty", "bernoulli", "multinomial", "normal")  # operations whose arguments do not say what comes out
SHAPED = {"view", "reshape", "expand", "repeat", "tile", "broadcast_to", "narrow", "split", "split_with_sizes", "unflatten", "pad"}
FEW = 4  # more than this a number is no dimension's


@dataclass(frozen=True)
class Input:
    """A tensor argument of the observed forward, by name."""

    name: str


@dataclass(frozen=True, eq=False)
class Operation:
    """What an operation of torch gives; its arguments are recipes."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any


@dataclass(frozen=True, eq=False)
class Returned:
    """What a Python function returns, whose arguments, by the names that its frame had, are recipes."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """A part of what has several."""

    of: Any
    key: Any


class Provenance:
    """Recipes of tensors; one that was written to since has none."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.names = {id(tensor): name for name, tensor in inputs.items()}
        self.known: dict[int, tuple[Tensor, int, Any]] = {}
        self.giver: dict[int, Call] = {}
        self.largest = LARGER * max((tensor.numel() for tensor in inputs.values()), default=0)
        self.sizes = {size for t in inputs.values() for size in (t.shape[:1] if t.is_floating_point() else t.shape)}

    def of(self, tensor: Tensor) -> Any:
        """The recipe of a tensor, or None."""
        if id(tensor) in self.names:
            return Input(self.names[id(tensor)])
        _, version, recipe = self.known.get(id(tensor), (None, None, None))
        return recipe if recipe is not None and tensor._version == version else None

    def recipe(self, value: Any) -> Any:
        """The recipe of a value.

        Raises:
            LookupError: a tensor in it has none, or a module is in it.
        """
        if isinstance(value, Tensor):
            recipe = self.of(value)
            if recipe is None:
                raise LookupError
            return recipe
        if type(value) is dict:
            return {key: self.recipe(item) for key, item in [*value.items()]}
        if type(value) in (tuple, list):
            return type(value)(self.recipe(item) for item in [*value])
        if isinstance(value, nn.Module) or any(True for _ in tensors_in(value)):
            raise LookupError
        return value

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """An operation of torch was called."""
        name = getattr(function, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if (
            in_place
            or any(word in name for word in UNSAID)
            or not self.all_known((args, kwargs))
            or self._is_sized(name, args, kwargs)
        ):
            return
        with suppress(LookupError):
            self._keep(result, Operation(function, self.recipe(args), self.recipe(kwargs)))

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """The recipe of a function's arguments; None if one has none, or no tensor is among them."""
        for value in arguments.values():  # most functions are given activations
            if isinstance(value, Tensor) and id(value) not in self.names and id(value) not in self.known:
                return None
        given = {name: value for name, value in arguments.items() if name != "self"}
        try:
            return self.recipe(given) if self.all_known(given) and not self._is_sized("", given) else None
        except LookupError:
            return None

    def _is_sized(self, name: str, *given: Any) -> bool:
        """Whether a number among the arguments may be a size of this batch: of the next one it will be another."""
        found = {abs(number) for number in whole_numbers(given)}
        if name in SHAPED:
            return max(found, default=0) > 1
        if name == "__getitem__":
            index = given[0][1]
            row = index[0] if isinstance(index, tuple) and index else index
            return isinstance(row, int) or max(found, default=0) > FEW or bool(found & self.sizes - {1})
        return any(number > FEW for number in found & self.sizes)

    def all_known(self, value: Any) -> bool:
        """Whether there are tensors in these containers, and all of them have recipes."""
        tensors = list(tensors_in(value, depth=0))
        return bool(tensors) and all(self.of(tensor) is not None for tensor in tensors)

    def returned(self, call: Call, value: Any) -> None:
        """A function returned, whose arguments have a recipe and which needs no weights."""
        place = place_of(call)
        if place is not None:
            self._keep(value, Returned(place[1], call.recipe or {}))
            self.giver |= {id(tensor): call for tensor in tensors_in(value, depth=0) if id(tensor) in self.known}

    def _keep(self, value: Any, recipe: Any) -> None:
        """Of several values those whose number is fixed: one for each image there may be more or fewer of the next time."""
        if isinstance(value, Tensor):
            if not value.is_inference() and value.numel() <= self.largest and self.of(value) is None:
                self.known[id(value)] = value, value._version, recipe
        elif isinstance(value, dict) or (isinstance(value, tuple) and (isinstance(recipe, Returned) or type(value) is not tuple)):
            for key, item in [*value.items()] if isinstance(value, dict) else [*enumerate(value)]:
                self._keep(item, Part(recipe, key))


def whole_numbers(value: Any) -> Iterator[int]:
    """Those in nested containers and slices."""
    if isinstance(value, int):
        yield from () if isinstance(value, bool) else (value,)
    elif isinstance(value, slice):
        yield from whole_numbers((value.start, value.stop, value.step))
    elif isinstance(value, (tuple, list, dict)):
        for item in [*(value.values() if isinstance(value, dict) else value)]:
            yield from whole_numbers(item)


def leaves(recipe: Any) -> Iterator[Input]:
    """The inputs that a recipe names."""
    if isinstance(recipe, Input):
        yield recipe
    for part in parts(recipe):
        yield from leaves(part)


def is_made(recipe: Any) -> bool:
    """Whether it names anything that was made of inputs, rather than inputs alone."""
    return isinstance(recipe, (Operation, Returned)) or any(map(is_made, parts(recipe)))


def parts(recipe: Any) -> Iterator[Any]:
    """The recipes that a recipe is made of."""
    if isinstance(recipe, Operation):
        yield from (recipe.args, recipe.kwargs)
    elif isinstance(recipe, Returned):
        yield recipe.arguments
    elif isinstance(recipe, Part):
        yield recipe.of
    elif isinstance(recipe, dict):
        yield from recipe.values()
    elif type(recipe) in (tuple, list):
        yield from recipe


def follow(recipe: Any, inputs: Mapping[str, Any], known: dict[int, Any]) -> Any:
    """What a recipe gives for these inputs; ``known`` is what was computed for them before."""
    if isinstance(recipe, Input):
        return inputs[recipe.name]
    if isinstance(recipe, Operation):
        if id(recipe) not in known:
            kwargs = follow(recipe.kwargs, inputs, known)
            known[id(recipe)] = recipe.function(*follow(recipe.args, inputs, known), **kwargs)
        return known[id(recipe)]
    if isinstance(recipe, Returned):
        return call(recipe.function, recipe.arguments, inputs, known)
    if isinstance(recipe, Part):
        return follow(recipe.of, inputs, known)[recipe.key]
    if type(recipe) is dict:
        return {key: follow(item, inputs, known) for key, item in recipe.items()}
    if type(recipe) in (tuple, list):
        return type(recipe)(follow(item, inputs, known) for item in recipe)
    return recipe


def call(function: Callable[..., Any], arguments: Mapping[str, Any], inputs: Mapping[str, Any], known: dict[int, Any]) -> Any:
    """What a function returns, by the names that a frame had: positional, starred and keyword parameters."""
    if id(arguments) in known:
        return known[id(arguments)]
    given = follow(dict(arguments), inputs, known)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, p in inspect.signature(function).parameters.items():
        if name not in given:
            continue
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            args.append(given[name])
        elif p.kind is p.VAR_POSITIONAL:
            args += given[name]
        elif p.kind is p.VAR_KEYWORD:
            kwargs.update(given[name])
        else:
            kwargs[name] = given[name]
    result = known[id(arguments)] = function(*args, **kwargs)
    return result


def tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Tensors in nested containers, and in plain objects such as caches; listed first, for another thread may change them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in [*value.values()]:
            yield from tensors_in(item, depth)
    elif isinstance(value, (list, tuple, set)):
        for item in [*value]:
            yield from tensors_in(item, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        yield from tensors_in(vars(value), depth - 1)
