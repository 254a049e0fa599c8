"""Rotate channel spaces by randomized Hadamard matrices that vanish into the weights around them.

    x <- x R:    writers  W <- Rᵀ W,  b <- Rᵀ b        readers  W <- W R        R = diag(±1) H

Shapes:  space [*, n]   R [n, n] orthogonal, the same for every space of one width and seed
Why:     a rotation spreads outliers over all channels of a space (QuaRot, arXiv:2404.00456; MQuant section 4).
Needs:   ops.raised
Gives:   spaces.rotated
Exact:   yes, up to reassociation (fp64 1e-12)
Refuses: a space that anything but weights and unit-scale RMSNorms touches: a non-linearity, a gain, a LayerNorm, an
         output that users see.  In a fragment (one of several graphs of a model) an input or output is allowed where
         the plan of the whole model rotates the space: an explicit ``rotate`` op then stands at the boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from ..graph.boundary import BoundaryError, Change, Crossings, by_copy, change_inputs, change_outputs, crossings
from ..graph.coordinates import Source
from ..graph.kinds import kind
from ..graph.linear import bias_of
from ..graph.program import Miss, Program
from ..graph.spaces import Space, Spaces, Touch
from ..ops.rotate import random_hadamard
from ..ops.rotate import reference as rotated


@dataclass(frozen=True)
class Site:
    """Spaces of one width to rotate (one, in a whole model), and where they cross a fragment's edges."""

    spaces: tuple[Space, ...]
    edges: Crossings

    def __str__(self) -> str:
        explicit = f"; {self.edges.count} explicit rotate at the graph's edges" if self.edges.count else ""
        return f"{'; '.join(map(str, self.spaces))}{explicit}"


@dataclass(frozen=True)
class FuseRotation:
    """See the module's docstring; ``seed`` is that of the random signs."""

    seed: int = 0
    name: ClassVar[str] = "fuse_rotation"
    needs: ClassVar[frozenset[str]] = frozenset({"ops.raised"})
    gives: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every space that weights write and linears read; in a fragment, those that the plan names."""
        spaces = Spaces.of(prog)
        eligible: dict[int, list[Space]] = {}
        alone: dict[str, fx.Node] = {}
        for space in spaces:
            if space.width < 2:
                alone.update((t.fqn, t.node) for t in space.readers)
                continue
            if not space.touches or _is_done(prog, space):
                continue
            reason = self.why_not_here(prog, space) if prog.fragment else self.why_not(prog, space)
            if reason and space.readers and (space.writers or space.made):
                yield _miss(space, reason)
            elif not reason and prog.fragment:
                eligible.setdefault(space.width, []).append(space)
            elif not reason:
                yield Site((space,), Crossings())
        for group in eligible.values():
            yield from self.with_edges(spaces, group)
        if not prog.fragment:
            yield from unfollowed(spaces, alone)

    def with_edges(self, spaces: Spaces, group: list[Space]) -> Iterator[Site | Miss]:
        """One site for all spaces of a width: they share edges, and R."""
        while group:
            try:
                yield Site(tuple(group), crossings(spaces, group))
                return
            except BoundaryError as error:
                yield from (_miss(space, str(error)) for space in error.spaces)
                group = [space for space in group if space not in error.spaces]

    def why_not(self, prog: Program, space: Space) -> str:
        """The reason to refuse in a whole model, or nothing."""
        if space.pins:
            return space.why_pinned
        if space.mean_pins:
            return f"{next(iter(space.mean_pins)).name}: a LayerNorm whose mean could not be folded"
        if space.made:
            return f"{_origin(space.made[0])}, so the rotation would have to run online"
        if space.inputs or space.outputs:
            return "a graph input or output lies on it"
        if not space.readers or not space.writers:
            return "nothing but one side of it is a weight"
        return ""

    def why_not_here(self, prog: Program, space: Space) -> str:
        """The same in a fragment, where the plan decides."""
        if prog.plan is None or not any(prog.plan.is_rotated(t.fqn, t.axis, t.groups) for t in space.touches):
            return "the whole model's plan leaves it alone"
        if not any(prog.is_quantized(t.fqn) for t in space.touches):
            return "no linear of this graph that it touches is quantized"
        return "a LayerNorm of this graph reads it" if space.mean_pins else ""

    def rewrite(self, prog: Program, site: Site) -> None:
        """Multiply R into every touch; at a fragment's edges put rotate ops."""
        width = site.spaces[0].width
        factors, signs = random_hadamard(width, self.seed)
        for touch in (t for space in site.spaces for t in space.touches):
            prog.decided.rotate(touch.fqn, touch.axis, touch.groups)
            prog.derive(
                touch.fqn, f"rotated {touch.role} axis {touch.axis}", touch.apply(_Rotate(factors, signs)), touch.axis
            )
            bias = bias_of(prog, touch.node) if touch.role == "writer" and touch.axis == 0 else ""
            if bias:
                prog.derive(
                    bias,
                    "rotated bias",
                    Touch(bias, 0, touch.groups, "writer", touch.node).apply(_Rotate(factors, signs)),
                )
        if site.edges.count:
            change_outputs(prog, site.edges, _rotate_by(prog, width, factors, signs, inverse=True))
            change_inputs(prog, site.edges.inputs, _rotate_by(prog, width, factors, signs, inverse=False))


def unfollowed(spaces: Spaces, alone: Mapping[str, fx.Node]) -> Iterator[Miss]:
    """Linears that no space says anything about."""
    for fqn, node in alone.items():
        if kind(node) != "conv":
            yield Miss(node.name, "each channel that it reads stands alone: there is nothing to mix it with", fqn)
    for reader in spaces.found.readers:
        x = spaces.found.contractions[reader.node].x
        if reader.ids is None and kind(x) != "placeholder" and kind(reader.node) != "conv":
            yield Miss(reader.node.name, f"{x.name}: nothing is known of the channels of a {kind(x)}", reader.fqn)


def _origin(source: Source) -> str:
    """What writes a space that is no linear's, embedding's or parameter's."""
    if source.what == "gain":
        return f"{source.fqn or 'a computed gain'} scales what {source.node.name} writes"
    return f"{source.node.name} ({kind(source.node)}) writes it"


def _is_done(prog: Program, space: Space) -> bool:
    return any(prog.decided.is_rotated(t.fqn, t.axis, t.groups) for t in space.touches)


def _miss(space: Space, reason: str) -> Miss:
    return Miss(space.touches[0].node.name, reason, ", ".join(sorted({t.fqn for t in space.touches})))


def _rotate_by(prog: Program, n: int, factors: list[Tensor], signs: Tensor, inverse: bool) -> Change:
    def change(x: fx.Node, copies: int) -> fx.Node:
        nodes = [prog.constant_node(f"rotation_{n}_{i}", f.float()) for i, f in enumerate(factors)]
        sign = prog.constant_node(f"rotation_{n}_signs", signs.float())
        rotate = lambda y: prog.graph.call_function(torch.ops.mmqc.rotate.default, (y, nodes, sign, inverse))  # noqa: E731
        return by_copy(prog, x, copies, n, rotate, FuseRotation.name)

    return change


@dataclass(frozen=True)
class _Rotate:
    factors: list[Tensor]
    signs: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        return rotated(v, [f.to(v) for f in self.factors], self.signs.to(v), inverse=False)
