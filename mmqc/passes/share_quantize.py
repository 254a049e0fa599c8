"""Linears that read one tensor quantize it once: q, k and v, gate and up.

    scaled_matmul(quantize(x, s'), W', s')  ->  scaled_matmul(quantize(x, s), W', s)        where s' = s
    quantize_per_token(x, order, K_p, bits) twice  ->  once                                  scales are found as x comes

Shapes:  those of ops/quantize.py and ops/quantize_per_token.py
Why:     a static scale is a property of x, which calibration saw once for each of its readers, so their scales are equal numbers
         in different tensors.  Shared, x is read once, and fuse_matmuls can make one product of the readers.
Needs:   nothing
Gives:   nothing
Exact:   yes; that the numbers are equal is checked here and again for every other tensor that arrives in their place
         (run_time.py)
Refuses: scales that differ; scales that are no inputs of the graph, or whose values are not there; by token, other parts,
         bits or orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import is_fake

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program
from mmqc.graph.runner import Pass

PER_TOKEN = "quantize_per_token"
EQUALS = "equals"  # in the meta of a placeholder: the placeholder whose values it has to have


@dataclass(frozen=True)
class Site:
    """A quantization that an earlier one stands for."""

    node: fx.Node
    first: fx.Node

    def __str__(self) -> str:
        return f"{self.node.name} is {self.first.name}"


@dataclass(frozen=True)
class ShareQuantize(Pass):
    name = "share_quantize"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Quantizations of one tensor, the later ones."""
        yield from self.by_token(prog)
        holders = (n for n in prog.graph.nodes if n.op == "placeholder")
        values = dict(zip(holders, prog.inputs, strict=True))
        seen: dict[tuple[object, ...], list[fx.Node]] = {}
        for node in prog.nodes("quantize"):
            x, _, *how = node.args
            earlier = seen.setdefault((x, *map(str, how)), [])
            first = next((e for e in earlier if same_scale(e, node, values)), None)
            if first is not None:
                yield Site(node, first)
                continue
            if earlier:
                yield Miss(node.name, f"its scale differs from that of {earlier[0].name}, which quantizes the same tensor")
            earlier.append(node)

    def by_token(self, prog: Program) -> Iterator[Site | Miss]:
        """Equal operands give equal codes; nothing of the values has to be known."""
        seen: dict[object, dict[str, fx.Node]] = {}
        for node in prog.nodes(PER_TOKEN):
            earlier = seen.setdefault(node.args[0], {})
            first = earlier.setdefault(repr(node.args[1:]), node)
            if first is not node:
                yield Site(node, first)
            elif len(earlier) > 1:
                yield Miss(node.name, "an earlier quantization of the same tensor has other parts, or another order")

    def rewrite(self, prog: Program, site: Site) -> None:
        """Let the readers of the later one read the first, with its scale."""
        if kind(site.node) == PER_TOKEN:
            site.node.replace_all_uses_with(site.first)
            return
        scale, first_scale = site.node.args[1], site.first.args[1]
        assert isinstance(first_scale, fx.Node)
        ours, theirs = source(site.node), source(site.first)
        if ours is not None and theirs is not None and ours[0] is not theirs[0]:
            ours[0].meta[EQUALS] = theirs[0]
        for user in list(site.node.users):
            user.args = tuple(first_scale if a is scale else a for a in user.args)
        site.node.replace_all_uses_with(site.first)


def source(node: fx.Node) -> tuple[fx.Node, str] | None:
    """The graph input that the scale is, and which part of it."""
    scale = node.args[1]
    if isinstance(scale, fx.Node) and scale.op == "placeholder":
        return scale, ""
    if isinstance(scale, fx.Node) and kind(scale) == "getitem":
        base = scale.args[0]
        if isinstance(base, fx.Node) and base.op == "placeholder":
            return base, repr(scale.args[1])
    return None


def same_scale(a: fx.Node, b: fx.Node, values: dict[fx.Node, object]) -> bool:
    """Whether two quantizations have scales of the same values."""
    first, second = source(a), source(b)
    if first is None or second is None or first[1] != second[1]:
        return False
    return first[0] is second[0] or equal(values[first[0]], values[second[0]])


def equal(a: object, b: object) -> bool:
    """Whether two real tensors hold the same numbers."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or is_fake(a) or is_fake(b):
        return False
    return a.shape == b.shape and a.device == b.device and torch.equal(a, b)
