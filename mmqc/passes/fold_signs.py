"""Flip random channels of a gated product, so that no channel of the Hadamard behind it collects what all have in common.

    W_down (a ∘ (W_up x + b)) = (W_down D) (a ∘ ((D W_up) x + D b))        D = diag(±1)

Shapes:  x [*, K]   a, W_up x [*, n]   W_up [n, K]   b [n]   W_down [N, n]
Why:     a Hadamard matrix has rows that add up all columns of W_down; behind random signs that sum is like any other
         (QuaRot, arXiv:2404.00456, section 3), and in a gated MLP D goes into weights.
Needs:   ops.raised
Gives:   nothing
Exact:   yes, to the bit: only signs change
Refuses: nothing; a product neither factor of which is written by weights alone and read by nothing else is no site.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from mmqc.graph.changes import Times
from mmqc.graph.kinds import kind
from mmqc.graph.linear import bias_of
from mmqc.graph.program import Program
from mmqc.graph.runner import Pass
from mmqc.graph.spaces.factors import is_between, owners, source_of
from mmqc.graph.spaces.spaces import Space, Spaces, Touch
from mmqc.ops.rotate import random_hadamard


@dataclass(frozen=True)
class Site:
    """The space of the products, that of the factor to flip, and which channel of the one each of the other is."""

    products: Space
    factor: Space
    place: Tensor

    def __str__(self) -> str:
        writers, readers = (", ".join(t.fqn for t in ts) for ts in (self.factor.writers, self.products.readers))
        return f"{writers} and {readers}"


@dataclass(frozen=True)
class FoldSigns(Pass):
    """``seed`` is that of the signs."""

    seed: int = 0
    name = "fold_signs"
    needs = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site]:
        """Spaces that only products write and only linears read."""
        spaces = Spaces.of(prog)
        owner = owners(spaces)
        for space in spaces:
            products = [n for source in space.made for n in spaces.made_by(source)]
            if not space.readers or not is_between(space) or any(kind(n) != "mul" for n in products):
                continue
            if _is_done(prog, space):
                continue
            found = (self.site(spaces, owner, space, products, side) for side in (1, 0))
            site = next((s for s in found if s is not None and self.is_planned(prog, s)), None)
            if site is not None:
                yield site

    def site(self, spaces: Spaces, owner: Tensor, space: Space, products: list[fx.Node], side: int) -> Site | None:
        """The site if the factors on this side are a space that nothing but these products reads."""
        found = source_of(spaces, owner, space, products, side)
        return None if found is None else Site(space, *found)

    def is_planned(self, prog: Program, site: Site) -> bool:
        """Whether the whole model's plan, if there is one, flips these."""
        touches = (*site.factor.writers, *site.products.readers)
        return prog.plan is None or all((t.fqn, t.axis) in prog.plan.flipped for t in touches)

    def rewrite(self, prog: Program, site: Site) -> None:
        """Flip rows of the factor's writers, and columns of the products' readers."""
        signs = random_hadamard(site.products.width, self.seed)[1]
        for touch in site.products.readers:
            self.flip(prog, touch, signs)
        for touch in site.factor.writers:
            self.flip(prog, touch, signs[site.place])
            bias = bias_of(prog, touch.node)
            if bias:
                self.flip(prog, Touch(bias, 0, touch.groups, "writer", touch.node), signs[site.place])

    def flip(self, prog: Program, touch: Touch, signs: Tensor) -> None:
        """Multiply one axis of a weight by signs."""
        prog.decided.flipped.add((touch.fqn, touch.axis))
        prog.derive(touch.fqn, f"signs on axis {touch.axis}", touch.apply(Times(signs)), touch.axis)


def _is_done(prog: Program, space: Space) -> bool:
    return any((t.fqn, t.axis) in prog.decided.flipped for t in space.readers)
