"""Linears that read one tensor become one operation: q, k and v, gate and up.

    y_i = scaled_matmul(x_q, W_i, s_x, s_i, b_i, …)     ->  y_1, y_2, … = scaled_matmuls(x_q, [W_1, W_2, …], s_x, …)
    y_i = weight_only_matmul(x, W_i, s_i, b_i, …)       ->  y_1, y_2, … = weight_only_matmuls(x, [W_1, W_2, …], …)

Why:     few rows (decoding) leave most of a GPU idle in a small product such as k_proj's: one launch over all columns reads the
         weights at the rate of the largest.  With many rows each product is computed as before.
Needs:   nothing; scaled_matmul is found where share_quantize left one quantized input
Gives:   nothing
Exact:   yes; where no kernel takes the fused form the linears are lowered one by one
Refuses: weights that the graph computes; operands some of which have a bias and others not; zero points; gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass

MOST = 3  # that a kernel takes

FUSED = {"scaled_matmul": "scaled_matmuls", "weight_only_matmul": "weight_only_matmuls"}
PER_LINEAR = {"scaled_matmul": (1, 3, 4), "weight_only_matmul": (1, 2, 3)}  # weight, its scale, bias
ZERO = 6  # operand of weight_only_matmul, if it is there
GROUP_SCALE = {"scaled_matmul": 8}  # where integer group scales are, if there are any


@dataclass(frozen=True)
class Site:
    """Linears of one input, in order."""

    nodes: tuple[fx.Node, ...]

    def __str__(self) -> str:
        return " + ".join(n.name for n in self.nodes)


@dataclass(frozen=True)
class FuseMatmuls(Pass):
    name = "fuse_matmuls"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Groups of two or three."""
        groups: dict[tuple[object, ...], list[fx.Node]] = {}
        for node in prog.nodes(*FUSED):
            own, args = own_operands(node), _without_zero(node)
            shared = tuple(str(a) if isinstance(a, torch.dtype) else a for i, a in enumerate(args) if i not in own)
            groups.setdefault((kind(node), own, args[own[2]] is None, _zero_of(node) is None, *shared), []).append(node)
        for nodes in groups.values():
            reason = self.why_not(nodes)
            for start in range(0, len(nodes), MOST):
                part = nodes[start : start + MOST]
                if len(part) > 1:
                    yield Miss(part[0].name, reason) if reason else Site(tuple(part))

    def why_not(self, nodes: list[fx.Node]) -> str:
        """The reason to leave a group as it is, or nothing."""
        own = own_operands(nodes[0])
        if _zero_of(nodes[0]) is not None:
            return "the fused form has no zero points"
        operands = [n.args[i] for n in nodes for i in own]
        if any(isinstance(o, fx.Node) and o.op not in ("placeholder", "get_attr") for o in operands):
            return "its weight is computed in the graph"
        x = nodes[0].args[0]
        example = x.meta.get("example_value") if isinstance(x, fx.Node) else None
        if torch.is_grad_enabled() and isinstance(example, Tensor) and example.requires_grad:
            return "the fused form has no gradient: run under torch.no_grad()"
        return ""

    def rewrite(self, prog: Program, site: Site) -> None:
        """One call at the place of the first."""
        first, own = site.nodes[0], own_operands(site.nodes[0])
        args = tuple([n.args[i] for n in site.nodes] if i in own else a for i, a in enumerate(_without_zero(first)))
        with prog.graph.inserting_before(first):
            fused = prog.graph.call_function(getattr(torch.ops.mmqc, FUSED[kind(first)]).default, args)
            copy_meta(fused, first, self.name, 0)
            for i, node in enumerate(site.nodes):
                part = prog.graph.call_function(operator.getitem, (fused, i))
                copy_meta(part, node, self.name, 0)
                if "example_value" in node.meta:
                    part.meta["example_value"] = node.meta["example_value"]
                node.replace_all_uses_with(part)


def _without_zero(node: fx.Node) -> tuple[Any, ...]:
    return node.args[:ZERO] if kind(node) == "weight_only_matmul" else node.args


def _zero_of(node: fx.Node) -> object:
    """The zero points of a ``weight_only_matmul``, or None."""
    given = node.args[ZERO] if len(node.args) > ZERO else node.kwargs.get("w_zero")
    return given if kind(node) == "weight_only_matmul" else None


def own_operands(node: fx.Node) -> tuple[int, ...]:
    """Places of the operands that each linear has for itself; the others are the same for all of a site."""
    place = GROUP_SCALE.get(kind(node), len(node.args))
    given = place < len(node.args) and node.args[place] is not None
    return (*PER_LINEAR[kind(node)], *((place,) if given else ()))
