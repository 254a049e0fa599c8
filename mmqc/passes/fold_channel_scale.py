"""Move a positive factor per channel from what writes a linear's input into the linear.

    W2 (g ∘ n(x) + β)      = (W2 diag(s)) (g/s ∘ n(x) + β/s)                      a norm's gain and bias
    W2 A (W1 x + b)        = (W2 diag(s)) A (diag(1/s) W1 x + b/s)                a linear; A mixes tokens, not channels
    W2 (a ∘ (W1 x + b))    = (W2 diag(s)) (a ∘ (diag(1/s) W1 x + b/s))            a gated product
    W2 relu(W1 x + b)      = (W2 diag(s)) relu(diag(1/s) W1 x + b/s)              what commutes with s > 0

Shapes:  x [*, K]   W1 [n, K]   W2 [N, n]   g, β, b, s [n]
Why:     channels of large inputs get large weights, and so a smaller relative rounding error (AWQ, arXiv:2306.00978, section 3.2).
Needs:   ops.raised; schemes on the linears
Gives:   nothing
Exact:   yes, up to reassociation (fp64 1e-12), for every s
Refuses: channels that anything but linears reads: a norm, another non-linearity, an output that users see; a gain whose
         expression is not w + c, or that something else uses; query heads that share a value head, under gqa="skip".
The factors come from ``scale``; in a fragment, from the plan of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from mmqc.config import Scheme
from mmqc.graph.kinds import kind, mutates
from mmqc.graph.linear import bias_of, weight_of
from mmqc.graph.program import Miss, Program
from mmqc.graph.runner import Pass
from mmqc.graph.scaling import Part, Scaling
from mmqc.graph.spaces.coordinates import Gain
from mmqc.graph.spaces.factors import is_between, owners, source_of
from mmqc.graph.spaces.spaces import Space, Spaces, Touch
from mmqc.graph.spaces.uses import only_in
from mmqc.passes.fold_norm_scale import is_norm

HOMOGENEOUS = ("relu", "leaky_relu")


@dataclass(frozen=True, eq=False)
class Site:
    """n channels that can be scaled: every weight axis on which they lie, and how each linear that reads them is quantized.

    ``scaling`` and ``note`` are set once the factors are chosen.
    """

    width: int
    parts: tuple[Part, ...]
    schemes: dict[str, Scheme]
    scaling: Scaling | None = None
    note: str = ""

    def __str__(self) -> str:
        names = (", ".join(dict.fromkeys(p.fqn for p in self.parts if p.reads is reads)) for reads in (False, True))
        return " -> ".join(names) + (f": {self.note}" if self.note else "")


Chosen = tuple[Tensor | None, str]


@dataclass(frozen=True)
class FoldChannelScale(Pass):
    """Factors, and where they may go.

    Attributes:
        scale: the factors [n] of a site and a word about them; None for the factors, or for both, leaves a site as it is.
            Without it the pass finds the sites and changes nothing.
        average: scale value heads that several query heads share, by one factor for all of them.
    """

    scale: Callable[[Site], Chosen | None] | None = field(default=None, compare=False)
    average: bool = True
    name = "fold_channel_scale"
    needs = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Sites with their factors; of a fragment, whatever the plan scales that is there."""
        if prog.plan is not None:
            yield from self.planned(prog)
        elif self.scale is not None:
            for site in find_sites(prog, self.average):
                chosen = self.scale(site) if isinstance(site, Site) else None
                if isinstance(site, Miss):
                    yield site
                elif chosen is not None:
                    yield from _decided(site, *chosen)

    def planned(self, prog: Program) -> Iterator[Site]:
        """The plan's scalings, of the weights that are here."""
        done = {id(scaling) for scaling in prog.decided.scalings}
        for scaling in prog.plan.scalings if prog.plan is not None else ():
            here = tuple(p for p in scaling.parts if p.fqn in prog.weights)
            if here and id(scaling) not in done:
                yield Site(len(scaling.scale), here, {}, scaling)

    def rewrite(self, prog: Program, site: Site) -> None:
        """Divide the writers, multiply the readers."""
        assert site.scaling is not None
        prog.decided.scalings.append(site.scaling)
        for part in site.parts:
            word = "diag(s)" if part.reads else "diag(1/s)"
            prog.derive(part.fqn, f"{word} on axis {part.axis}", part.step(site.scaling.scale), part.axis)


def _decided(site: Site, factors: Tensor | None, note: str) -> Iterator[Site | Miss]:
    """The site with its factors, or its readers, which are left alone."""
    if factors is not None:
        yield replace(site, scaling=Scaling(factors, site.parts), note=note)
    else:
        yield from (Miss("", note, fqn) for fqn in site.schemes)


def find_sites(prog: Program, average: bool = True) -> Iterator[Site | Miss]:
    """Where factors can be moved into linears that will be quantized, and the linears where they cannot."""
    scaled = {(p.fqn, p.axis) for s in prog.decided.scalings for p in s.parts if p.reads}
    wanted: dict[str, fx.Node] = {}
    for node in prog.nodes("linear"):
        if "scheme" in node.meta and (weight_of(node), 1) not in scaled:
            wanted.setdefault(weight_of(node), node)
    if not wanted:
        return
    spaces = Spaces.of(prog, through_norms=False)
    finder = _Finder(prog, spaces)
    found: dict[tuple[frozenset[str], frozenset[str]], list[list[Part]]] = {}
    for space in spaces:
        readers = {t.fqn for t in space.readers if t.axis == 1} & wanted.keys()
        if not readers:
            continue
        parts = finder.parts(space, average)
        if isinstance(parts, str):
            finder.refused |= dict.fromkeys(readers, parts)
        else:
            # an attention's heads are a space each, and one input of one linear
            found.setdefault(_names(parts), []).append(parts)
    covered = set()
    for several in found.values():
        site = _joined(several, {f: n.meta["scheme"] for f, n in wanted.items()})
        covered |= site.schemes.keys()
        yield site
    for fqn, node in wanted.items():
        if fqn not in covered:
            yield Miss(node.name, finder.refused.get(fqn, "its input is no space of its own"), fqn)


class _Finder:
    """What writes a space, if it can be divided by a factor per channel."""

    def __init__(self, prog: Program, spaces: Spaces) -> None:
        self.prog, self.spaces, self.owner = prog, spaces, owners(spaces)
        self.refused: dict[str, str] = {}
        self.gains: dict[str, list[Gain]] = {}
        for gain in spaces.found.gains:
            self.gains.setdefault(gain.source.fqn, []).append(gain)

    def parts(self, space: Space, average: bool) -> list[Part] | str:
        """Every weight axis on the space, or why it is not to be scaled."""
        writers = self.writers(space)
        if isinstance(writers, str):
            return writers
        if not average and self.is_shared(space, writers):
            return "query heads share its value heads"
        return [*writers, *(_part(t, torch.arange(space.width), reads=True) for t in space.readers)]

    def writers(self, space: Space) -> list[Part] | str:
        """Everything that writes the space, or why that is not to be changed."""
        if space.pins:
            return space.why_pinned
        if space.norms or space.mean_pins:
            return "a norm reads its input too"
        if space.inputs or space.outputs:
            return "a graph input or output lies on its input"
        if space.gains:
            return self.gain(space)
        if space.made:
            return self.product(space)
        return self.linears(space, torch.arange(space.width))

    def is_shared(self, space: Space, writers: list[Part]) -> bool:
        """Whether linears write the space and some reader reads it several times over: values of grouped queries."""
        copies = max(len(t.groups) for t in space.readers)
        return copies > 1 and any(self.prog.weights[p.fqn].dim() > 1 for p in writers)

    def linears(self, space: Space, place: Tensor) -> list[Part] | str:
        """Rows of weights, and their biases."""
        parts = []
        for touch in space.writers:
            if kind(touch.node) not in ("linear", "get_attr"):
                return f"{touch.node.name} writes its input"
            parts.append(_part(touch, place, reads=False))
            bias = bias_of(self.prog, touch.node)
            if bias:
                parts.append(_part(replace(touch, fqn=bias, axis=0), place, reads=False))
        return parts

    def gain(self, space: Space) -> list[Part] | str:
        """A norm's gain, and its bias."""
        (name, index), *others = space.gains.items()
        gains = self.gains.get(name, [])
        if others or len(space.made) != 1 or not name or "," in name or len(index) != self.prog.weights[name].numel():
            return "several gains write its input"
        if not all(is_norm(g.x) for g in gains):
            return "what its input's gain scales is no norm's output"
        if not only_in(self.prog, name, {g.node for g in gains}):
            return "something else reads its norm's gain"
        shift = _shift(self.prog, gains[0].factor, name)
        if shift is None:
            return "its norm's gain is not w + c"
        if any(self.prog.weights[t.fqn].dim() != 1 for t in space.writers):
            return "a linear writes the channels of its norm too"
        channels = torch.arange(space.width)
        biases = [_part(t, channels, reads=False) for t in space.writers]
        return [Part(name, 0, index, channels, False, shift), *biases]

    def product(self, space: Space) -> list[Part] | str:
        """A factor of a product, or what a homogeneous non-linearity reads."""
        nodes = [n for source in space.made for n in self.spaces.made_by(source)]
        words = {kind(n) for n in nodes}
        sides = (1, 0) if words == {"mul"} else (0,) if len(words) == 1 and words <= {*HOMOGENEOUS} else ()
        if not is_between(space) or not sides or any(mutates(n) for n in nodes):
            return f"{', '.join(sorted(words))} makes its input"
        for side in sides:
            found = source_of(self.spaces, self.owner, space, nodes, side)
            if found is not None:
                return self.linears(*found)
        return "neither factor of the product that it reads is a linear's alone"


def _shift(prog: Program, factor: fx.Node, name: str) -> float | None:
    """C, if a gain's expression is w + c."""
    weight = prog.weights[name]
    device = "cpu" if weight.is_meta else weight.device
    at = [prog.constant(factor, {name: torch.full(weight.shape, v, dtype=torch.float64, device=device)}) for v in (0.0, 1.0, 2.0)]
    shift = float(at[0].reshape(-1)[0])
    return shift if all(bool((gain == shift + v).all()) for v, gain in enumerate(at)) else None


def _part(touch: Touch, channels: Tensor, reads: bool) -> Part:
    copies = touch.groups.shape[0]
    return Part(touch.fqn, touch.axis, touch.groups.reshape(-1).cpu(), channels.repeat(copies), reads)


def _names(parts: Iterable[Part]) -> tuple[frozenset[str], frozenset[str]]:
    parts = list(parts)
    return frozenset(p.fqn for p in parts if p.reads), frozenset(p.fqn for p in parts if not p.reads)


def _joined(several: list[list[Part]], schemes: dict[str, Scheme]) -> Site:
    """One site of the channels of several spaces, each axis of a weight one part."""
    merged: dict[tuple[str, int, bool], list[Part]] = {}
    width = 0
    for parts in several:
        count = max(int(p.channel.max()) for p in parts) + 1
        for p in parts:
            merged.setdefault((p.fqn, p.axis, p.reads), []).append(replace(p, channel=p.channel + width))
        width += count
    joined = tuple(
        replace(ps[0], index=torch.cat([p.index for p in ps]), channel=torch.cat([p.channel for p in ps])) for ps in merged.values()
    )
    readers = dict.fromkeys(p.fqn for p in joined if p.reads)
    return Site(width, joined, {f: schemes[f] for f in readers if f in schemes})
