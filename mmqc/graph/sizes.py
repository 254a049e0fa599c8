"""Sizes of a node's value as plain integers or symbols, compared without asking anything of the shape environment.

Dynamo keeps a fake tensor in ``meta["example_value"]``, a recording keeps ``meta["shape"]``.  A ``SymInt`` is replaced by
its expression: comparing two SymInts would specialise the graph to the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

Sizes = tuple[Any, ...]  # of int or sympy expressions
EXAMPLE = "example_value"
GUESS = 4096  # elements along an axis whose size nobody knows when the graph is compiled


def expression(size: Any) -> Any:
    """An int, or the symbolic expression of a SymInt."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def value_of(node: Any) -> Any:
    """The example value that a capture left: a tensor, a sequence of tensors, a number, or None."""
    return node.meta.get(EXAMPLE) if isinstance(node, fx.Node) else None


def is_sequence(node: fx.Node) -> bool:
    """Whether the node's value is a tuple or list of tensors (a split)."""
    return isinstance(value_of(node), tuple | list)


def sizes(node: Any) -> Sizes | None:
    """The sizes of a tensor, or of the first tensor of a sequence; None for anything else and where nothing is known."""
    value = value_of(node)
    if isinstance(value, tuple | list):
        value = value[0] if value else None
    if isinstance(value, Tensor):
        return tuple(expression(s) for s in value.shape)
    shape = node.meta.get("shape") if isinstance(node, fx.Node) and value is None else None
    return None if shape is None else tuple(expression(s) for s in shape)


def agree(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether sizes of two tensors are the same; two symbols are if the traced call's are, which whoever relies on it guards."""
    return len(one) == len(other) and all(
        expression(a) == expression(b) or _same_hint(a, b) for a, b in zip(one, other, strict=True)
    )


def _same_hint(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt)
    return both and a.node.hint is not None and a.node.hint == b.node.hint


def product(parts: Sequence[Any]) -> Any:
    """The product of sizes."""
    return math.prod(parts)


def _hint(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return GUESS if hint is None else int(hint)
    return int(size)


def n_bytes(node: fx.Node) -> int:
    """Bytes of a tensor at the sizes that the graph is compiled for."""
    value = value_of(node)
    if isinstance(value, Tensor):
        return math.prod(_hint(s) for s in value.shape) * value.dtype.itemsize
    shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
    return math.prod(map(_hint, shape)) * (dtype.itemsize if dtype is not None else 4) if shape is not None else GUESS
