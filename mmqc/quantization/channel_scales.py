"""AWQ between the exact rewrites and calibration: measure the inputs of the linears that can be scaled, choose, scale.

    live forwards  ->  XᵀX and mean|x| of every set of readers  ->  solvers/awq.py  ->  passes/fold_channel_scale.py

loss     layer   the readers' own output error, from XᵀX; nothing is run again
         block   the error of the output of the module that holds all readers (block_loss.py), run again for every exponent

Blocks are run one after the other on what the block in front returned (stream.py): one pass through the model, because the
factors of one block change no other's inputs.  What is in no block is measured by forwards of the whole model, in rounds whose
moments fit ``MOMENT_BYTES``.  Linears that read one tensor (q, k and v) share one second moment.

Of several ranks each runs its part of the batches.  They search together: what is judged by a module's output, each on its
batches; what is judged by XᵀX, each its part of the exponents, because one linear of a block is dearer than all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from mmqc.calibration.block_loss import Calls, holder
from mmqc.calibration.blocks import NotStreamableError, Segment, survey
from mmqc.calibration.calibrate import EQUAL, weighted_rows
from mmqc.calibration.moments import add_second_moment, mirror_, narrowed_
from mmqc.calibration.observe import observe
from mmqc.calibration.residency import Residency
from mmqc.calibration.spool import Spool
from mmqc.calibration.stream import Feed, capture
from mmqc.config import ChannelScales
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Program
from mmqc.graph.runner import run
from mmqc.nn.modality import ModalityContext
from mmqc.passes.fold_channel_scale import Chosen, Site, find_sites
from mmqc.pipeline import FACTS, measured_passes
from mmqc.solvers import awq

MOMENT_BYTES = 4 << 30


@dataclass(frozen=True)
class Forwards:
    """How the model is run.

    Attributes:
        calls: forwards of the whole model, one a batch.
        recorded: two of them that differ, from which the model's blocks are learned.
        context: tells visual from text rows.
        residency: where a block runs.
        row_weights: what a row of each modality counts in every loss and mean.
        spool: folder for activations; None keeps them in host memory.
        say: called with a line about what is being done.
        ranks: the processes that share the batches.
    """

    calls: Sequence[Callable[[], Any]]
    recorded: Sequence[Callable[[], Any]]
    context: ModalityContext | None
    residency: Residency
    row_weights: Mapping[str, float] = field(default_factory=lambda: dict(EQUAL))
    spool: str | None = None
    say: Callable[[str], Any] = lambda line: None
    ranks: Ranks = ALONE

    def mine(self) -> list[tuple[int, Callable[[], Any]]]:
        """(number of the batch, its forward) of this rank."""
        return [(number, self.calls[number]) for number in self.ranks.mine(range(len(self.calls)))]


@torch.no_grad()
def scale_channels(model: nn.Module, prog: Program, options: ChannelScales, how: Forwards) -> None:
    """Run ``fold_channel_scale`` on ``prog`` with AWQ's factors.

    Args:
        model: runs the batches; its weights are those of ``prog``.
        prog: its linears have schemes.
        options: of the search.
        how: the forwards.
    """
    average = options.shared_heads == "average"
    search = _Search(model, prog, options, how)
    search.run([s for s in find_sites(prog, average) if isinstance(s, Site)])
    run(prog, measured_passes(scale=lambda site: search.chosen.get(_key(site)), average=average), FACTS, text=True)


class Moments:
    """Σ a_m X_mᵀ X_m float64 [K, K] and Σ a_m |x| float64 [K] of one linear's input rows; a: weight of the rows' modality."""

    def __init__(self, language: bool, how: Forwards) -> None:
        self.language, self.how = language, how
        self.square: Tensor | None = None
        self.magnitude: Tensor | None = None
        self.rows = 0.0

    def update(self, x: Tensor) -> None:
        """Take in a forward's input."""
        for weight, rows in weighted_rows(x, self.language, self.how.context, self.how.row_weights):
            self.square = add_second_moment(self.square, rows, weight)
            magnitude = rows.abs().sum(0, dtype=torch.float64) * weight
            self.magnitude = magnitude if self.magnitude is None else self.magnitude.add_(magnitude)
            self.rows += weight * len(rows)

    def parts(self) -> dict[str, Tensor]:
        """What there is of both, to be added to other ranks'."""
        known = {"square": self.square, "magnitude": self.magnitude}
        return {name: part for name, part in known.items() if part is not None}


def _finish(moments: Sequence[Moments], ranks: Ranks) -> None:
    """All batches of all ranks are in; in float32 from here on, unless the model is in float64."""
    parts = {(i, name): part for i, m in enumerate(moments) for name, part in m.parts().items()}
    rows = ranks.collected([[m.rows for m in moments]])
    total = ranks.summed(parts)
    for i, m in enumerate(moments):
        m.rows = sum(there[i] for there in rows)
        m.square, m.magnitude = total.pop((i, "square"), None), total.pop((i, "magnitude"), None)
        if m.square is not None:
            m.square = narrowed_(mirror_(m.square))


class _Search:
    """Factors for sites: ``chosen``, by ``_key``."""

    def __init__(self, model: nn.Module, prog: Program, options: ChannelScales, how: Forwards) -> None:
        self.model, self.prog, self.options, self.how = model, prog, options, how
        self.shared = _inputs(prog)
        self.language = {weight_of(n): n.meta.get("tower") == "language" for n in prog.nodes("linear")}
        self.chosen: dict[frozenset[str], Chosen] = {}
        self.done: set[frozenset[str]] = set()

    def run(self, sites: list[Site]) -> None:
        """Block by block where that can be, then what is left."""
        refused: dict[str, str] = {}
        while any(_key(site) not in self.done for site in sites):
            layout = survey(self.model, [name for site in sites for name in _modules(site)], self.how.recorded, refused)
            try:
                self.by_blocks([u for u in layout.units if isinstance(u, Segment)], sites)
            except NotStreamableError as error:
                refused = {**layout.refused, error.where: error.reason}
                continue
            self.by_forwards([site for site in sites if _key(site) not in self.done])

    def by_blocks(self, segments: list[Segment], sites: list[Site]) -> None:
        """All sites that lie in one block each."""
        inside: dict[str, list[Site]] = {}
        for name in (block.name for segment in segments for block in segment.blocks):
            mine = [s for s in sites if all(m.startswith(f"{name}.") for m in _modules(s))]
            inside[name] = [s for s in mine if _key(s) not in self.done]
        segments = [s for s in segments if any(inside[b.name] for b in s.blocks)]
        with closing(Spool(self.how.spool)) as store:
            feeds = [Feed(s, self.how.context, store, self.how.residency.device) for s in segments]
            if feeds:
                capture(self.model, feeds, self.how.mine(), ranks=self.how.ranks)
            for feed in feeds:
                self.segment(feed, inside, store)

    def segment(self, feed: Feed, inside: Mapping[str, list[Site]], store: Spool) -> None:
        """The blocks of a segment, one after the other."""
        blocks = feed.segment.blocks
        last = max(number for number, block in enumerate(blocks) if inside[block.name])
        for number, block in enumerate(blocks[: last + 1]):
            self.how.say(block.name)
            new: dict[int, list[Any]] = {}
            with self.how.residency.resident(block.name):
                with self.observing(inside[block.name], store, block.name) as seen:
                    for batch in feed.batches:
                        output = feed.call(self.model, number, batch)
                        new[batch] = feed.outputs(output) if number < last else []
                self.choose(inside[block.name], seen)
            feed.advance(number, new)

    def by_forwards(self, sites: list[Site]) -> None:
        """Sites in rounds, each of which is one more run over the batches."""
        for part in _rounds(sites, self.shared, self.prog):
            with closing(Spool(self.how.spool)) as store:
                with self.observing(part, store) as seen:
                    for _, call in self.how.mine():
                        call()
                for site in part:
                    with self.how.residency.around(_modules(site)[0]):
                        self.choose([site], seen)

    @contextmanager
    def observing(self, sites: list[Site], store: Spool, block: str = "") -> Iterator[_Seen]:
        """The readers, and the modules around them, observed for the length of a ``with`` block."""
        names = {self.shared[fqn]: fqn for site in sites for fqn in site.schemes}
        seen = _Seen({key: Moments(self.language[fqn], self.how) for key, fqn in names.items()})
        if self.options.loss == "block":
            for site in sites:
                name = holder(self.model, _modules(site), self.behind_a_norm(site), block)
                # what spans several blocks is too much to run for every exponent
                if name and not any(b.startswith(f"{name}.") for b in self.how.residency.blocks):
                    seen.holders[_key(site)] = name
                    language = self.language[next(iter(site.schemes))]
                    place = (store, self.how.residency.device, self.how.context)
                    calls = Calls(self.model, name, *place, language, self.how.ranks)
                    seen.calls.setdefault(name, calls)
        places: dict[Any, Any] = {fqn.removesuffix(".weight"): seen.moments[key] for key, fqn in names.items()}
        for calls in seen.calls.values():
            places |= calls.places
        with observe(self.model, places):
            yield seen
        for calls in seen.calls.values():
            calls.agree()
        _finish(list(seen.moments.values()), self.how.ranks)

    def behind_a_norm(self, site: Site) -> bool:
        """Whether only vectors write the channels: a norm's gain, and its bias."""
        return all(self.prog.weights[p.fqn].dim() == 1 for p in site.parts if not p.reads)

    def choose(self, sites: list[Site], seen: _Seen) -> None:
        """The best factors of each site; all ranks know the same losses, and take the factors of the first."""
        own = {}
        for site in sites:
            self.done.add(_key(site))
            calls, note = seen.calls.get(seen.holders.get(_key(site), "")), ""
            if calls is not None and calls.reason:
                calls, note = None, f"; by the layers' own outputs: {calls.reason}"
            readers = [r for f in site.schemes if (r := self.reader(site, f, seen.moments[self.shared[f]])) is not None]
            if not readers:
                continue
            if calls is not None:
                note = f" of {calls.name}"
            losses = partial(self.losses, readers, calls)
            how = self.options
            found = awq.search(readers, site.width, duo=how.duo, grid=how.grid, at_most=how.at_most, losses=losses)
            own[_key(site)] = (found.scale if found.alpha is not None else None), f"{found}{note}"
        self.chosen.update(self.how.ranks.shared(lambda: own))

    def losses(self, readers: list[awq.Reader], calls: Calls | None, scales: Sequence[Tensor]) -> Sequence[float]:
        """What each of some factors loses."""
        if calls is not None:
            weights = ({r.name: awq.rounded_behind(r, scale) for r in readers} for scale in scales)
            return calls.errors(weights, self.how.row_weights)
        return self.how.ranks.collected(awq.losses_of(readers, self.how.ranks.mine(scales)))

    def reader(self, site: Site, fqn: str, seen: Moments) -> awq.Reader | None:
        """A reader with its statistics; None if no row reached it."""
        if seen.square is None or seen.magnitude is None or not seen.rows:
            return None
        weight = self.prog.value(fqn)
        channel = torch.full((weight.shape[-1],), -1)
        for part in site.parts:
            if part.fqn == fqn and part.reads:
                channel = torch.maximum(channel, part.columns(weight.shape[-1]))
        return awq.Reader(fqn, weight, channel, seen.square, seen.magnitude / seen.rows, site.schemes[fqn].weight)


@dataclass
class _Seen:
    """What hooks gathered: moments by shared input, calls by module, and which module a site is judged by."""

    moments: dict[Any, Moments]
    calls: dict[str, Calls] = field(default_factory=dict)
    holders: dict[frozenset[str], str] = field(default_factory=dict)


def _key(site: Site) -> frozenset[str]:
    return frozenset(f"{p.fqn} {p.axis}" for p in site.parts)


def _modules(site: Site) -> list[str]:
    return [fqn.removesuffix(".weight") for fqn in site.schemes]


def _inputs(prog: Program) -> dict[str, tuple[fx.Node, ...]]:
    """What each linear reads, by the FQN of its weight, over all recorded calls."""
    found: dict[str, tuple[fx.Node, ...]] = {}
    for node in prog.nodes("linear"):
        found[weight_of(node)] = (*found.get(weight_of(node), ()), operands(node)["input"])
    return found


def _rounds(sites: list[Site], shared: Mapping[str, Any], prog: Program) -> Iterable[list[Site]]:
    """Sites in order, in parts whose second moments fit."""
    part, there, size = [], set(), 0
    for site in sites:
        new = {shared[fqn]: 8 * prog.weights[fqn].shape[-1] ** 2 for fqn in site.schemes if shared[fqn] not in there}
        if part and size + sum(new.values()) > MOMENT_BYTES:
            yield part
            part, there, size = [], set(), 0
            new = {shared[fqn]: 8 * prog.weights[fqn].shape[-1] ** 2 for fqn in site.schemes}
        part.append(site)
        there |= new.keys()
        size += sum(new.values())
    if part:
        yield part
