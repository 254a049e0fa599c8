"""Calls of Python functions, and where the functions that were called are looked up."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn

from mmqc.graph.reads import SIZE_READS
from mmqc.graph.tracing import codes_of

Owner = nn.Module | dict[str, Any]


@dataclass
class Call:
    """One call of a Python function, with its arguments as it was called; ``scopes`` are its callers' globals, innermost first.

    It ``weighs`` if an operation in it was given a parameter, or what parameters made; ``recipe`` says what its arguments were made
    of (provenance.py).  It holds no frame and no activation: those of a whole forward would be alive at once.  A float tensor is on
    the meta device.
    """

    code: CodeType
    scopes: tuple[dict[str, Any], ...]
    arguments: dict[str, Any]
    reads: list[Read] = field(default_factory=list)
    outer: Call | None = None
    returned: Any = None
    weighs: bool = False
    recipe: dict[str, Any] | None = None

    @property
    def owner(self) -> nn.Module | None:
        """The module whose method this is."""
        owner = self.arguments.get("self")
        return owner if isinstance(owner, nn.Module) else None

    def around(self) -> Iterator[Call]:
        """This call and those it was made by, innermost first."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.outer


@dataclass(frozen=True)
class Read:
    """A read, the calls around it, the line that it stands in, how many calls there had been, and the numbers that came out.

    ``giver`` is the call of a function that can run in front and returned the tensor that was read, if one did.
    """

    op: str
    call: Call | None
    where: str
    at: int = 0
    numbers: frozenset[int] = frozenset()
    giver: Call | None = None

    @property
    def scalar(self) -> bool:
        """Whether a Python number came out of it, rather than a tensor of unknown size."""
        return self.op not in SIZE_READS

    def __str__(self) -> str:
        return f"{self.op} at {self.where}"


def plain(function: Any) -> Any:
    """The function that a reader stands for, or the function itself."""
    return getattr(function, "mmqc_stands_for", function)


def place_of(call: Call) -> tuple[Owner, Callable[..., Any]] | None:
    """Where a function is looked up by name, as an attribute of a module or a global of its caller, and what is there."""
    name, owner = call.code.co_name, call.owner
    if owner is not None:
        function = getattr(owner, name, None)
        if function is None or call.code not in codes_of(function):
            return None
        if name in owner.__dict__:
            return owner, plain(function)
        return owner, getattr(type(owner), name) if not isinstance(function, types.MethodType) else function
    for scope in call.scopes:
        function = scope.get(name)
        if callable(function) and call.code in codes_of(plain(function)):
            return scope, plain(function)
    return None
