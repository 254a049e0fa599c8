"""A function of activations that acts on every row alike, as plain data: what lies between an expert's linears.

    h = f(u)     or     h = f(g, u)          e.g.  chunk -> silu -> mul

A program is a list of steps ``{"op": word, "args": [...], "kwargs": {...}}``, JSON as it stands; a step's result goes by
``{"value": i}``: the inputs first, then the results in order.  The last step's result is the program's.
Words are those of graph/kinds.py, functions those of torch.nn.functional and torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Step = dict[str, Any]

ELEMENTWISE = frozenset(
    (
        "abs",
        "add",
        "celu",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clip",
        "div",
        "elu",
        "erf",
        "exp",
        "gelu",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "leaky_relu",
        "log",
        "maximum",
        "minimum",
        "mish",
        "mul",
        "neg",
        "pow",
        "relu",
        "relu6",
        "rsub",
        "selu",
        "sigmoid",
        "silu",
        "softplus",
        "sqrt",
        "square",
        "sub",
        "tanh",
    )
)
ALONG_ROWS = frozenset(("chunk", "glu", "split"))  # of the last axis
CASTS = frozenset(("float", "to"))
WORDS = ELEMENTWISE | ALONG_ROWS | CASTS | {"getitem"}


def encoded(value: Any) -> Any:
    """An argument as JSON.

    Raises:
        TypeError: it is no number, text, dtype, slice or list of them.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return [encoded(v) for v in value]
    if isinstance(value, Mapping) and value.keys() == {"value"}:
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is an argument")


def _decoded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_decoded(v) for v in value)
    if not isinstance(value, Mapping):
        return value
    if "slice" in value:
        return slice(*value["slice"])
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    return Ellipsis if "ellipsis" in value else _Result(value["value"])


class _Result:
    def __init__(self, index: int) -> None:
        self.index = index


def _function(word: str) -> Callable[..., Any]:
    if word not in WORDS:
        raise ValueError(f"unknown step {word!r} of a pointwise program; this mmqc knows {sorted(WORDS)}, update it")
    if word == "getitem":
        return operator.getitem
    return getattr(Tensor, word) if word in CASTS else getattr(torch, word, None) or getattr(F, word)


class Pointwise:
    """A program that can be called.

    Attributes:
        inputs: how many it takes.
        steps: the data that it is made of.
    """

    def __init__(self, inputs: int, steps: Sequence[Step]) -> None:
        self.inputs, self.steps = inputs, [dict(step) for step in steps]
        self._calls = [
            (_function(s["op"]), tuple(map(_decoded, s["args"])), {k: _decoded(v) for k, v in s["kwargs"].items()})
            for s in self.steps
        ]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The last step's result; the input itself where there is no step."""
        values: list[Any] = list(inputs)
        for function, args, kwargs in self._calls:
            values.append(function(*(values[a.index] if isinstance(a, _Result) else a for a in args), **kwargs))
        return values[-1]

    def __str__(self) -> str:
        return " -> ".join(step["op"] for step in self.steps if step["op"] != "getitem") or "identity"
