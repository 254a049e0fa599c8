"""Recognise linears that are spelled as products with a transposed weight.

    x @ W.T            ->  linear(x, W)
    x @ W.T + b        ->  linear(x, W, b)
    addmm(b, x, W)     ->  linear(x, W.t(), b)

Shapes:  x [*, K]   W [N, K] ([K, N] for addmm)   b [N]
Why:     every pass that edits or quantizes linears looks for one kind of node.
Needs:   nothing
Gives:   nothing
Exact:   yes, up to reassociation (fp64 1e-12)
Refuses: nothing: a product that is no such thing is no site.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Program, copy_meta
from mmqc.graph.runner import Pass

_PRODUCTS = ("matmul", "addmm")


@dataclass(frozen=True)
class Site:
    """``node`` becomes ``linear(x, weight, bias)``; ``product`` is what it is made of."""

    node: fx.Node
    product: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    def __str__(self) -> str:
        return f"{kind(self.node)} {self.node.name} with {self.weight.target}"


@dataclass(frozen=True)
class RaiseLinear(Pass):
    name = "raise_linear"

    def match(self, prog: Program) -> Iterator[Site]:
        """Products whose second operand is a transposed weight, with the bias behind them."""
        for node in prog.nodes(*_PRODUCTS):
            if kind(node) == "addmm":
                bias, x, weight = node.args[:3]
                if _is_matrix(prog, weight) and _is_vector(prog, bias) and not node.kwargs:
                    yield Site(node, node, x, weight, bias)  # type: ignore[arg-type]
                continue
            weight = _transposed(prog, node.args[1])
            if weight is not None:
                add, bias = _bias_behind(prog, node, prog.weights[str(weight.target)].shape[0])
                yield Site(add or node, node, node.args[0], weight, bias)  # type: ignore[arg-type]

    def rewrite(self, prog: Program, site: Site) -> None:
        """Replace the node."""
        x = site.product.args[1 if kind(site.product) == "addmm" else 0]
        with prog.graph.inserting_before(site.node):
            weight = prog.graph.call_method("t", (site.weight,)) if kind(site.product) == "addmm" else site.weight
            new = prog.graph.call_function(torch.nn.functional.linear, (x, weight, site.bias))
        copy_meta(new, site.product, self.name, 0)
        prog.sketch_as(new, site.node)
        for key in ("shape", "dtype", "example_value"):
            if key in site.node.meta:
                new.meta[key] = site.node.meta[key]
        site.node.replace_all_uses_with(new)


def _is_matrix(prog: Program, node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and prog.weights[str(node.target)].dim() == 2


def _is_vector(prog: Program, node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and prog.weights[str(node.target)].dim() == 1


def _transposed(prog: Program, node: Any) -> fx.Node | None:
    """The stored matrix whose transpose ``node`` is."""
    if not isinstance(node, fx.Node) or not node.args or not _is_matrix(prog, node.args[0]):
        return None
    if kind(node) in ("t", "getattr:T", "getattr:mT"):
        return node.args[0]  # type: ignore[return-value]
    swaps = kind(node) == "transpose" and {a % 2 for a in node.args[1:] if isinstance(a, int)} == {0, 1}
    return node.args[0] if swaps else None  # type: ignore[return-value]


def _bias_behind(prog: Program, node: fx.Node, width: int) -> tuple[fx.Node | None, fx.Node | None]:
    """The addition of a stored vector that is all that uses ``node``, and the vector."""
    users = list(node.users)
    if len(users) != 1 or kind(users[0]) != "add" or users[0].kwargs:
        return None, None
    other = next((a for a in users[0].args if a is not node), None)
    fits = _is_vector(prog, other) and prog.weights[str(other.target)].numel() == width  # type: ignore[union-attr]
    same = fits and node.meta.get("module") == users[0].meta.get("module")
    return (users[0], other) if same else (None, None)  # type: ignore[return-value]
