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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..graph.boundary import rotate_inputs, rotate_outputs
from ..graph.kinds import kind
from ..graph.linear import bias_of
from ..graph.program import Miss, Program
from ..graph.spaces import Space, Spaces, Touch
from ..ops.rotate import random_hadamard, rotation_matrix


@dataclass(frozen=True)
class Site:
    """A space to rotate; ``spaces`` is the analysis it belongs to."""

    space: Space
    spaces: Spaces

    def __str__(self) -> str:
        return str(self.space)


@dataclass(frozen=True)
class FuseRotation:
    """See the module's docstring; ``seed`` is that of the random signs."""

    seed: int = 0
    name: ClassVar[str] = "fuse_rotation"
    needs: ClassVar[frozenset[str]] = frozenset({"ops.raised"})
    gives: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every space that weights write and linears read."""
        spaces = Spaces.of(prog)
        for space in spaces:
            if space.width < 2 or not space.touches:
                continue
            linears = any(kind(t.node) == "linear" for t in space.touches)
            planned = linears and prog.plan is not None and any(prog.plan.is_rotated(t.fqn, t.axis, t.groups) for t in space.touches)
            reason = self.why_not(prog, space, planned)
            if not reason:
                yield Site(space, spaces)
            elif space.readers or planned:
                yield Miss(space.touches[0].node.name, reason, ", ".join(sorted({t.fqn for t in space.touches})))

    def why_not(self, prog: Program, space: Space, planned: bool) -> str:
        """The reason to refuse, or nothing."""
        if space.pins:
            return f"{space.pins[0][0]}: {space.pins[0][1]}"
        if space.mean_pins:
            return f"{next(iter(space.mean_pins)).name}: a LayerNorm whose mean could not be folded"
        if space.made:
            return f"{space.made[0].node.name} is no weight, so the rotation would have to run online"
        if prog.plan is not None and not planned:
            return "the whole model's plan leaves it alone"
        if prog.fragment and planned:
            return ""
        if space.inputs or space.outputs:
            return "a graph input or output lies on it"
        if not space.readers or not space.writers:
            return "nothing but one side of it is a weight"
        return ""

    def rewrite(self, prog: Program, site: Site) -> None:
        """Multiply R into every touch; at a fragment's boundary put rotate ops."""
        space = site.space
        factors, signs = random_hadamard(space.width, self.seed)
        r = rotation_matrix(factors, signs)
        for touch in space.touches:
            prog.decided.rotate(touch.fqn, touch.axis, touch.groups)
            prog.derive(touch.fqn, f"rotated {touch.role} axis {touch.axis}", touch.apply(_Rotate(r)))
            bias = bias_of(prog, touch.node) if touch.role == "writer" and touch.axis == 0 else ""
            if bias:
                prog.derive(bias, "rotated bias", Touch(bias, 0, touch.groups, "writer", touch.node).apply(_Rotate(r)))
        if prog.fragment:
            rotate_inputs(prog, site.spaces, space, factors, signs)
            rotate_outputs(prog, site.spaces, space, factors, signs)


@dataclass(frozen=True)
class _Rotate:
    r: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        return v @ self.r.to(v)
