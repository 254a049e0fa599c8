"""An online Hadamard, the gate in front of it and the quantization behind it become one operation.

    quantize(hadamard(silu(g) * u), s)  ->  hadamard_quantize(g, u, s)
    quantize(hadamard(x), s)            ->  hadamard_quantize(x, s)
    quantize(hadamard(…), s), and its channels S    ->  hadamard_quantize_kept(…, S, s)        (magnitude suppression)
    quantize_per_token(hadamard(…), …)  ->  hadamard_quantize_per_token(…)

Why:     the wide activation of an MLP is read and written once instead of three times.
Needs:   nothing
Gives:   nothing
Exact:   yes as an operation; a kernel rounds once more, between the two halves of the transform
Refuses: a transform that something else reads too, but for a few of its channels; by token, several parts of the channels, or an
         order; a gate that is not silu, or that something else reads, is left in front.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.ops import hadamard_quantize_kept
from mmqc.passes.share_quantize import PER_TOKEN


@dataclass(frozen=True)
class Site:
    """A quantization, the transform in front of it, and what that reads: x, or gate and up; what reads some of its channels."""

    quantize: fx.Node
    hadamard: fx.Node
    gate: fx.Node
    up: fx.Node | None
    kept: fx.Node | None = None

    def __str__(self) -> str:
        gated = "" if self.up is None else f"silu({self.gate.name}) * {self.up.name}, "
        return f"{gated}{self.hadamard.name}, {self.quantize.name}"


@dataclass(frozen=True)
class FuseHadamardQuantize(Pass):
    name = "fuse_hadamard_quantize"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every quantization of a transform."""
        for node in (*prog.nodes("quantize"), *prog.nodes(PER_TOKEN)):
            transform = node.args[0]
            if not isinstance(transform, fx.Node) or kind(transform) != "hadamard":
                continue
            x = transform.args[0]
            kept = None if kind(node) == PER_TOKEN else kept_of(transform, node)
            if len(transform.users) > 1 + (kept is not None):
                yield Miss(node.name, f"{len(transform.users)} operations read {transform.name}")
            elif kind(node) == PER_TOKEN and (node.args[1] is not None or len(node.args[2]) > 1):  # type: ignore[arg-type]
                yield Miss(node.name, "the channels behind its transform are in several parts, or in another order")
            elif torch.is_grad_enabled() and requires_grad(x):
                yield Miss(node.name, "the fused form has no gradient: run under torch.no_grad()")
            elif isinstance(x, fx.Node):
                yield Site(node, transform, *gated(x), kept)

    def rewrite(self, prog: Program, site: Site) -> None:
        """One call."""
        if site.kept is not None:
            self.rewrite_kept(prog, site, site.kept)
            return
        how, op = site.quantize.args[1:], torch.ops.mmqc.hadamard_quantize.default
        if kind(site.quantize) == PER_TOKEN:
            _, _, (bits,) = how  # type: ignore[misc]
            how, op = (bits,), torch.ops.mmqc.hadamard_quantize_per_token.default
        with prog.graph.inserting_before(site.quantize):
            fused = prog.graph.call_function(op, (site.gate, site.up, site.hadamard.args[1], *how))
        copy_meta(fused, site.quantize, self.name, 0)
        if "example_value" in site.quantize.meta:
            fused.meta["example_value"] = site.quantize.meta["example_value"]
        site.quantize.replace_all_uses_with(fused)

    def rewrite_kept(self, prog: Program, site: Site, kept: fx.Node) -> None:
        """One call with two results."""
        op, channels = torch.ops.mmqc.hadamard_quantize_kept.default, kept.args[2]
        if isinstance(channels, fx.Node) and channels.op == "get_attr":
            site.quantize.prepend(channels)
        with prog.graph.inserting_before(site.quantize):
            given = (site.gate, site.up, site.hadamard.args[1], channels, *site.quantize.args[1:])
            fused = prog.graph.call_function(op, given)
            parts = [prog.graph.call_function(operator.getitem, (fused, i)) for i in range(2)]
        copy_meta(fused, site.quantize, self.name, 0)
        for old, new in zip((site.quantize, kept), parts, strict=True):
            copy_meta(new, old, self.name, 0)
            if "example_value" in old.meta:
                new.meta["example_value"] = old.meta["example_value"]
            old.replace_all_uses_with(new)


def kept_of(transform: fx.Node, quantize: fx.Node) -> fx.Node | None:
    """What reads a few channels of the transform that ``quantize`` reads, if there is one thing that does."""
    others = [user for user in transform.users if user is not quantize]
    if len(others) != 1 or kind(others[0]) != "index_select" or len(others[0].args) != 3:
        return None
    _, axis, channels = others[0].args
    x, few = (n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in (transform, channels))
    if not isinstance(x, Tensor) or not isinstance(few, Tensor) or axis not in (-1, x.dim() - 1):
        return None
    known = others[0] > quantize and (channels.op == "get_attr" or channels < quantize)  # type: ignore[operator, union-attr]
    if not known or few.dtype != torch.int64 or few.dim() != 1 or not isinstance(few.shape[0], int):
        return None
    return others[0] if few.shape[0] <= hadamard_quantize_kept.MOST else None


def gated(x: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """(gate, up) where x is silu(gate) * up of one shape and nothing else reads the two, else (x, None)."""
    if kind(x) == "mul" and len(x.users) == 1 and len(x.args) == 2:
        for i, factor in enumerate(x.args):
            up = x.args[1 - i]
            if not isinstance(factor, fx.Node) or not isinstance(up, fx.Node):
                continue
            if kind(factor) == "silu" and len(factor.users) == 1 and not factor.kwargs.get("inplace"):
                gate = factor.args[0]
                if isinstance(gate, fx.Node) and form(gate) and form(gate) == form(up):
                    return gate, up
    return x, None


def form(node: object) -> str:
    """Shape and dtype in words: to compare symbolic sizes would guard on them."""
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return f"{tuple(example.shape)} {example.dtype}" if isinstance(example, Tensor) else ""


def requires_grad(node: object) -> bool:
    """Whether autograd follows the node's value."""
    example = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return isinstance(example, Tensor) and example.requires_grad
