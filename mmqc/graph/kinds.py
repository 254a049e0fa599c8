"""One name per operation, whichever capture wrote the node.

The recorder writes ``call_method`` nodes for tensor methods and ``call_function`` nodes for the rest, as Dynamo does,
but the same addition still arrives as ``operator.add``, ``torch.add``, ``Tensor.add``, ``Tensor.__radd__`` or ``iadd``.
``kind(node)`` folds these into one word; passes and analyses compare that word and never look at targets.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

_SYNONYMS = {
    "radd": "add",
    "iadd": "add",
    "rsub": "rsub",
    "isub": "sub",
    "subtract": "sub",
    "rmul": "mul",
    "imul": "mul",
    "multiply": "mul",
    "truediv": "div",
    "true_divide": "div",
    "itruediv": "div",
    "divide": "div",
    "rtruediv": "rdiv",
    "rdiv": "rdiv",
    "rpow": "rpow",
    "square": "square",
    "negative": "neg",
    "invert": "bitwise_not",
    "rmatmul": "rmatmul",
    "bmm": "matmul",
    "mm": "matmul",
    "imatmul": "matmul",
    "view_as": "view",
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "convolution": "conv",
    "conv1d": "conv",
    "conv2d": "conv",
    "conv3d": "conv",
    "get": "getattr",
}


def kind(node: fx.Node) -> str:
    """The operation's canonical name; ``getattr:T`` for attribute reads, the FX op for anything that is no call."""
    if node.op == "call_method":
        return _word(str(node.target))
    if node.op != "call_function":
        return node.op
    word = _function(node.target)
    return f"getattr:{node.args[1]}" if word == "getattr" else word


@functools.cache
def _function(target: Any) -> str:
    name = getattr(target, "__name__", None) or str(target).rsplit(".", 1)[-1]
    if name == "getattr":
        return name
    namespace, parts = getattr(target, "namespace", None), str(target).split(".")
    ours = namespace not in (None, "aten", "prims") and len(parts) > 1  # operators of higher order have a namespace and no dot
    return _word(parts[1] if ours else name)


@functools.cache
def _word(name: str) -> str:
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    elif name.endswith("_"):
        name = name.rstrip("_")
    return _SYNONYMS.get(name, name)


def mutates(node: fx.Node) -> bool:
    """Whether the node writes into its first argument."""
    name = str(node.target) if node.op == "call_method" else _name(node.target)
    dunder = name.startswith("__") and name.endswith("__")
    plain = name.strip("_") if dunder else name
    if plain in _IN_PLACE_OPERATORS:
        return True
    if name in ("and_", "or_", "not_", "is_"):  # of the operator module, where keywords get an underscore
        return False
    return (not dunder and name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True


def _name(target: Any) -> str:
    """A function's; an operator's without namespace and overload."""
    return str(getattr(target, "__name__", "")).split(".")[0]


_IN_PLACE_OPERATORS = {"setitem", "iadd", "isub", "imul", "itruediv", "ipow", "ior", "iand", "imatmul"}
