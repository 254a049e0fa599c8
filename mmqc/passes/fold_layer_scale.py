"""Fold a layer scale, a gain per channel behind a linear, into the linear's rows.

    λ * (W x + b)  =  (diag(λ) W) x + λ * b

Shapes:  x [*, K]   W [N, K]   λ, b [N]
Why:     a gain pins the channels that it scales; vision transformers put one in front of every residual addition (CaiT,
         arXiv:2103.17239, equation 4: InternViT, DINOv2, BEiT), so that no stream of theirs could be rotated.
Needs:   ops.raised
Gives:   nothing: what was refused stays a pin of its space
Exact:   yes, up to reassociation (fp64 1e-12)
Refuses: a gain behind anything but a linear of its own; a linear whose result something else reads; a weight, bias or gain
         that is used elsewhere too; a gain whose expression has no neutral value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mmqc.graph.changes import Placed, Times
from mmqc.graph.kinds import kind, mutates
from mmqc.graph.linear import bias_of, weight_of
from mmqc.graph.memory import written
from mmqc.graph.program import Miss, Program
from mmqc.graph.runner import Pass
from mmqc.graph.spaces.coordinates import Gain
from mmqc.graph.spaces.spaces import Spaces
from mmqc.graph.spaces.uses import only_in
from mmqc.passes.fold_norm_scale import as_wide, is_norm, neutral_value

_PASSED = ("dropout", "identity", "to", "float", "type_as", "type", "half", "bfloat16", "contiguous")


@dataclass(frozen=True)
class Site:
    """All multiplications by one gain, and the weight and bias that take it in."""

    gain: str
    neutral: float
    muls: tuple[Gain, ...]
    weight: str
    bias: str

    def __str__(self) -> str:
        return f"{self.gain} -> {self.weight}"


@dataclass(frozen=True)
class FoldLayerScale(Pass):
    name = "fold_layer_scale"
    needs = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Gains by name; every use of one must be foldable, or none is."""
        by_name: dict[str, list[Gain]] = {}
        for gain in Spaces.of(prog, through_norms=False).found.gains:
            if not is_norm(gain.x):  # those are fold_norm_scale's
                by_name.setdefault(gain.source.fqn, []).append(gain)
        in_place = written(prog) if by_name else set()
        for name, gains in by_name.items():
            linears = [_linear_behind(g) for g in gains]
            if not any(linears):
                continue  # no layer scale: what it pins, fuse_rotation says
            reason = self.why_not(prog, name, gains, linears, in_place)
            if reason:
                yield Miss(gains[0].node.name, reason, name)
                continue
            first, neutral = linears[0], neutral_value(prog, gains[0].factor, name)
            assert first is not None
            assert neutral is not None
            yield Site(name, neutral, tuple(gains), weight_of(first), bias_of(prog, first))

    def why_not(self, prog: Program, name: str, gains: list[Gain], linears: list[fx.Node | None], in_place: set[fx.Node]) -> str:
        """The reason to refuse, or nothing."""
        if not name or "," in name:
            return "the gain is computed from activations or from several weights"
        weights = {weight_of(n) if n is not None else "" for n in linears}
        if "" in weights or len(weights) > 1:
            return "what it scales is not one linear's output alone"
        if any(_read_elsewhere(g) for g in gains):
            return "something else reads what it scales"
        if set(prog.users_of(*weights)) != set(linears):
            return "something else uses the linear's weight"
        bias = {bias_of(prog, n) if n is not None else "" for n in linears}
        if len(bias) > 1 or any(set(prog.users_of(b)) != set(linears) for b in bias if b):
            return "something else uses the linear's bias"
        if any(n is not None and _has_another_bias(prog, n) for n in linears):
            return "the linear's bias is computed"
        if not only_in(prog, name, {g.node for g in gains}):
            return "something else reads the gain's weight"
        if any(mutates(g.node) or g.node in in_place for g in gains):
            return "its memory is written to in place"
        if neutral_value(prog, gains[0].factor, name) is None:
            return "no value of the weight makes this gain 1"
        return ""

    def rewrite(self, prog: Program, site: Site) -> None:
        """W <- diag(λ) W, b <- λ b, λ <- 1; drop the multiplications."""
        scale = prog.constant(site.muls[0].factor, {site.gain: prog.snapshot(site.gain)()}).reshape(-1)
        prog.derive(site.weight, f"diag({site.gain}) W", Placed(0, None, Times(scale)), axis=0)
        if site.bias:
            prog.derive(site.bias, f"{site.gain} b", Placed(0, None, Times(scale)))
        prog.derive(site.gain, f"{site.neutral:g}", lambda w: torch.full_like(w, site.neutral))
        for gain in site.muls:
            gain.node.replace_all_uses_with(as_wide(prog, gain, self.name))


def _linear_behind(gain: Gain) -> fx.Node | None:
    """The linear whose result the gain scales."""
    node: Any = gain.x
    while kind(node) in _PASSED and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if kind(node) == "linear" and weight_of(node) else None


def _read_elsewhere(gain: Gain) -> bool:
    """Whether anything but the gain reads the linear's result, on the way too."""
    node: Any = gain.x
    while kind(node) != "linear" and len(node.users) == 1:
        node = node.args[0]
    return len(node.users) > 1


def _has_another_bias(prog: Program, node: fx.Node) -> bool:
    bias = node.kwargs.get("bias", node.args[2] if len(node.args) > 2 else None)
    return bias is not None and not bias_of(prog, node)
