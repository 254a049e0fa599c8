"""ResQ's bases between the exact rewrites and calibration: measure second moments, diagonalise, rotate on.

    live forwards  ->  M = Xᵀ X (moments.py)  ->  solvers/principal_basis.py  ->  fuse_rotation with U in place of R

    U_A   a residual stream's: X are the inputs of the linears that read it, gains folded, every norm's once, over all layers
    U_B   a value head's: X are the values that its linear writes, biases included
    or, for the baseline "outlier + rotation", max |x| of the channels that there were before the random rotation

Spaces are already rotated at random here, which a basis does not notice: U is found in the coordinates that there are.  Each
linear that reads a basis learns which of its inputs are the high subspace's (``meta["high"]``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from mmqc.calibration.moments import add_second_moment, mirror_
from mmqc.calibration.observe import Output, observe
from mmqc.config import Bases, QuantConfig
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.graph.changes import Turned
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Program
from mmqc.graph.runner import run
from mmqc.graph.spaces.spaces import Space, Spaces, Touch
from mmqc.passes.fuse_rotation import place
from mmqc.passes.quantize_mixed import HIGH, LOWEST
from mmqc.pipeline import FACTS, measured_passes
from mmqc.solvers.principal_basis import high_width, peak_basis, principal_basis

Batches = Callable[[], Iterable[Mapping[str, Any]]]


@dataclass
class Found:
    """A space that gets a basis.

    Attributes:
        space: its coordinates, rotated by ``turned`` [n, n] already, if that is not None.
        high, lowest: how many of its coordinates are in the high part, and in a third one.
        by: ``Bases.by``.
        seen: XᵀX as it grows, or, by peaks, max |x| of every channel before the rotation.
    """

    space: Space
    high: int
    lowest: int = 0
    by: str = "variance"
    turned: Tensor | None = None
    seen: Tensor | None = None

    def add(self, x: Tensor, groups: Tensor) -> None:
        """Take in activations [*, K] on which the space lies at ``groups`` [copies, n]."""
        x, width = x.detach(), groups.shape[1]
        if x.shape[-1] != width or not torch.equal(groups, torch.arange(width)[None]):
            x = x[..., groups.to(x.device)]
        x = x.reshape(-1, width)
        if self.by == "variance":
            self.seen = add_second_moment(self.seen, x)
        elif len(x):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            peaks = (x if self.turned is None else x @ self.turned.to(x).T).abs().amax(0).double()
            self.seen = peaks if self.seen is None else torch.maximum(self.seen, peaks)

    def basis(self, seed: int, random: str) -> Tensor:
        """U, in the coordinates that there are."""
        assert self.seen is not None
        if self.by == "variance":
            return principal_basis(mirror_(self.seen), self.high, seed, random, self.lowest)
        u = peak_basis(self.seen, self.high, seed, random, self.lowest)
        return u if self.turned is None else self.turned.to(u).T @ u


class _Shared(list[tuple[Found, Tensor]]):
    """The spaces that lie on one tensor, each with its places there."""

    def update(self, x: Tensor, *call: Any) -> None:
        """Take in the tensor."""
        for found, groups in self:
            found.add(x, groups)


@torch.no_grad()
def rotate_to_bases(model: nn.Module, prog: Program, config: QuantConfig, batches: Batches, ranks: Ranks = ALONE) -> None:
    """Run ``fuse_rotation`` on ``prog`` with ResQ's bases, and say on the linears which of their inputs are high.

    Args:
        model: runs the batches; its weights are those of ``prog``.
        prog: after the exact passes; its linears have schemes.
        config: ``rewrites.bases``, and each scheme's high fraction.
        batches: gives the calibration batches of this rank.
        ranks: who sees the others.
    """
    options = config.rewrites.bases
    assert options is not None
    linears: dict[str, fx.Node] = {weight_of(n): n for n in prog.nodes("linear") if "scheme" in n.meta}
    all_found = list(_eligible(prog, linears, options, config.rewrites.seed))
    with observe(model, _places(prog, linears, all_found)):
        for batch in batches():
            model(**batch)
    seed, given = config.rewrites.seed, {}
    seen = {number: found.seen for number, found in enumerate(all_found) if found.seen is not None}
    seen = ranks.summed(seen) if options.by == "variance" else ranks.largest(seen)
    for number in sorted(seen):
        found = all_found[number]
        found.seen = seen[number]
        given[place(found.space)] = ranks.shared(lambda found=found: found.basis(seed, options.random))
    run(prog, measured_passes(seed=seed, given=given), FACTS, text=True)
    for found in all_found:
        if found.high and place(found.space) in prog.decided.based:
            _mark(prog, found)


def _eligible(prog: Program, linears: Mapping[str, fx.Node], options: Bases, seed: int) -> Iterator[Found]:
    """Spaces that weights alone write and read, and of which some reader wants high coordinates."""
    for space in Spaces.of(prog):
        free = space.inside and not space.pins and not space.mean_pins and space.writers and space.width > 1
        if not free or not (options.streams if space.norms else options.heads):
            continue
        schemes = (linears[t.fqn].meta["scheme"].dynamic for t in space.readers if t.fqn in linears and t.axis == 1)
        wanted = [d for d in schemes if d is not None and d.high == "basis"]
        if wanted:
            high, lowest = (max(getattr(d, f"{part}_fraction") for d in wanted) for part in ("high", "lowest"))
            turned = None
            if all(prog.decided.is_rotated(t.fqn, t.axis, t.groups) for t in space.touches):
                turned = Turned.of(space.width, seed, False)(torch.eye(space.width, dtype=torch.float64))
            high = high_width(space.width, high)
            lowest = min(high_width(space.width, lowest), space.width - high - 1)
            yield Found(space, high, lowest, options.by, turned)


def _places(prog: Program, linears: Mapping[str, fx.Node], all_found: Iterable[Found]) -> dict[str | Output, _Shared]:
    """Where to look: at a stream's readers, one for each tensor that they read, or at a head's writers."""
    places: dict[str | Output, _Shared] = {}
    for found in all_found:
        for touch in _sources(prog, linears, found.space):
            fqn = touch.fqn.removesuffix(".weight")
            places.setdefault(fqn if touch.role == "reader" else Output(fqn), _Shared()).append((found, touch.groups))
    return places


def _sources(prog: Program, linears: Mapping[str, fx.Node], space: Space) -> Iterator[Touch]:
    if not space.norms:
        yield from (t for t in space.writers if t.axis == 0 and prog.hosted(t.node, "linear"))
        return
    seen: set[Any] = set()
    for touch in space.readers:
        if touch.fqn in linears and touch.axis == 1:
            x = operands(linears[touch.fqn])["input"]
            if x not in seen:
                yield touch
            seen.add(x)


def _mark(prog: Program, found: Found) -> None:
    """Note the high inputs, and those of a third part, on every linear that reads the space."""
    parts = {HIGH: slice(found.space.width - found.high, None), LOWEST: slice(found.lowest)}
    readers = {t.fqn: t.groups for t in found.space.readers if t.axis == 1}
    for node in prog.nodes("linear"):
        groups = readers.get(weight_of(node))
        if groups is None or "scheme" not in node.meta:
            continue
        for name, part in parts.items():
            index = groups[:, part].reshape(-1)
            node.meta[name] = torch.cat((node.meta.get(name, index.new_empty(0)), index)).unique()
