"""The first tokens of a cache lie in memory as PyTorch puts them there.

    cat([empty, x])  ->  clone(x), contiguous

Shapes:  empty [0], x and the result [...]
Why:     transformers' growing cache begins as an empty tensor.  PyTorch makes the result contiguous; Inductor copies x with its
         strides, those of a transposed tensor.  The first step was then compiled for these, and the second one, whose cache is
         the result of a real ``cat``, once more for contiguous ones.
Needs:   nothing
Gives:   nothing
Exact:   yes, to the bit
Refuses: –; a ``cat`` of two tensors that hold something, or of two dtypes, is another operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass


@dataclass(frozen=True)
class Site:
    """The ``cat``, and the one operand that holds something."""

    cat: fx.Node
    operand: fx.Node

    def __str__(self) -> str:
        return f"{self.cat.name} of nothing and {self.operand.name}"


@dataclass(frozen=True)
class RewriteEmptyCat(Pass):
    name = "rewrite_empty_cat"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every ``cat`` of nothing and one tensor."""
        for node in prog.graph.nodes:
            operand = only_operand(node)
            if operand is not None:
                yield Site(node, operand)

    def rewrite(self, prog: Program, site: Site) -> None:
        """A contiguous copy."""
        with prog.graph.inserting_after(site.cat):
            new = prog.graph.call_method("clone", (site.operand,), {"memory_format": torch.contiguous_format})
        copy_meta(new, site.cat, self.name, 0)
        new.meta["example_value"] = site.cat.meta.get("example_value")
        site.cat.replace_all_uses_with(new)


def only_operand(node: fx.Node) -> fx.Node | None:
    """What a ``cat`` of it and an empty tensor of its dtype is a copy of; None for any other node."""
    if kind(node) != "cat" or "out" in node.kwargs:
        return None
    given = node.args[0] if node.args else node.kwargs.get("tensors")
    parts = [p for p in given if isinstance(p, fx.Node)] if isinstance(given, tuple | list) else []
    values = [p.meta.get("example_value") for p in parts]
    if len(parts) != 2:
        return None
    (a, b), (x, y) = parts, values
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dtype != y.dtype or _is_nothing(x) == _is_nothing(y):
        return None
    return b if _is_nothing(x) else a


def _is_nothing(value: Tensor) -> bool:
    return value.dim() == 1 and type(value.shape[0]) is int and value.shape[0] == 0
