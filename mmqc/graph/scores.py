"""Linears that attention scores are made of: those of queries and keys, one that makes them together with values included.

    linear -> (+ bias, norm of a head, rotary embedding, reshapes, a cache) -> q or k of attention, or of softmax(q kᵀ ...)

Between such a linear and the scores stands no other product.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from mmqc.graph.kinds import kind
from mmqc.graph.linear import contraction, weight_of
from mmqc.graph.program import Program
from mmqc.graph.tokens.uses import attention, is_attention

PRODUCTS = frozenset(("linear", "conv", "matmul", "rmatmul", "baddbmm", "einsum", "softmax"))


def score_weights(prog: Program) -> set[str]:
    """FQNs of the weights of these linears."""
    starts: list[fx.Node] = []
    for node in prog.graph.nodes:
        if is_attention(node):
            named = attention(node)
            starts += [n for n in (named["query"], named["key"]) if isinstance(n, fx.Node)]
        elif kind(node) == "softmax":
            products = (n for n in _back(node.all_input_nodes) if kind(n) in PRODUCTS - {"linear", "conv"})
            starts += [n for p in products if contraction(prog, p) is None for n in p.all_input_nodes]
    return {fqn for node in _back(starts) if kind(node) == "linear" and (fqn := weight_of(node))}


def _back(starts: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes in front of ``starts``, these included, as far as the last product or attention."""
    seen = set(starts)
    todo = list(seen)
    while todo:
        node = todo.pop()
        if kind(node) in PRODUCTS or is_attention(node):
            continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return seen
