"""Quantize a model unit by unit: observe the inputs of a unit's linears, solve, measure, swap, go on to the next.

    unit        a block of a segment (blocks.py), or the linears outside all blocks
    float       every linear is calibrated on what the floating-point model feeds it: one forward a block
    quantized   ... on what the already quantized units in front feed it: two forwards a block, as GPTQ's own code does it
    asymmetric  ... on that, to give what the floating-point model gives: three forwards a block, one of them in that model, whose
                inputs go from block to block beside the quantized one's (GPTAQ; twins.py).  Lists that cannot be taken apart go
                without

Memory:  the statistics of one block, and the activations between two blocks, in host memory or in files (spool.py).
Ranks:   each runs its part of the batches; what they saw is put together (joined.py) before a unit is solved.  Of N ranks with
         float inputs N blocks are solved side by side, for most of a block's work may be one linear's.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mmqc.calibration import joined
from mmqc.calibration.blocks import Layout, Outside, Segment
from mmqc.calibration.calibrate import InputStatistics, Observer, Watch, weighted_rows
from mmqc.calibration.learn import BatchLoss
from mmqc.calibration.measure import Loss, Meter
from mmqc.calibration.observe import Call, observe
from mmqc.calibration.residency import Residency
from mmqc.calibration.spool import Spool
from mmqc.calibration.stream import Feed, capture, result_of
from mmqc.calibration.twins import Twins
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.modality import ModalityContext

Inputs = Literal["float", "quantized", "asymmetric"]


class Worker(Protocol):
    """What the owner of the model does with a unit; ``linears`` are module FQNs."""

    def finished(self, linears: Sequence[str]) -> bool:
        """Whether an earlier run has quantized this unit already."""
        ...

    def restore(self, linears: Sequence[str]) -> None:
        """Swap in what that run found; nothing to do for what this run did."""
        ...

    def owners(self, linears: Sequence[str], first: int = 0) -> Mapping[str, int]:
        """The rank that needs a linear's second moment, because it is the one that solves it; ``first`` gets the dearest."""
        ...

    def solve_mine(self, linears: Sequence[str], seen: Mapping[str, InputStatistics]) -> None:
        """Solve this rank's linears of a unit; ``exchange`` gives all ranks what they have solved so far."""
        ...

    def exchange(self) -> None:
        """See ``solve_mine``; ``solve`` finds the results."""
        ...

    def solve(self, linears: Sequence[str], seen: Mapping[str, InputStatistics]) -> dict[str, PackedLinear]:
        """Quantize the weights; the model stays as it is."""
        ...

    def learns(self, linears: Sequence[str]) -> list[str]:
        """Those whose rounding is learned from their block's output, once they are solved."""
        ...

    def learn(self, linears: Sequence[str], block: str, loss: BatchLoss, batches: Sequence[int]) -> dict[str, PackedLinear]:
        """Learn the rounding of a unit that is solved; ``loss`` is that of a batch, with the weights that the ``block`` has."""
        ...

    def swap(self, built: Mapping[str, PackedLinear], losses: Mapping[str, Loss]) -> None:
        """Put the linears into the model; the unit is finished."""
        ...


@dataclass(frozen=True)
class _Waiting:
    """A block whose inputs are known: its linears, their statistics, and the calls that losses are measured on."""

    name: str
    linears: Sequence[str]
    seen: Mapping[str, InputStatistics]
    measured: Sequence[Callable[[nn.Module], Any]]


@dataclass
class Sequential:
    """One run over a model.

    Attributes:
        model: whose blocks are called.
        worker: quantizes and swaps.
        linears: module FQNs of all linears to quantize, in the model's order.
        watches: what to observe, by module FQN; none for a linear whose scheme needs no data.
        language: whether a linear's rows are the language model's tokens.
        calls: forwards of the whole model, one a batch.
        measured: numbers of the batches that losses are measured on.
        context: tells visual from text rows.
        residency: where a block runs.
        inputs: see the top of the file.
        spool: folder for activations; None keeps them in host memory.
        say: called with a line about what is being done.
        ranks: the processes that share the batches.
    """

    model: nn.Module
    worker: Worker
    linears: Sequence[str]
    watches: Mapping[str, Watch]
    language: Mapping[str, bool]
    calls: Sequence[Callable[[], Any]]
    measured: Sequence[int]
    context: ModalityContext | None
    residency: Residency
    inputs: Inputs = "float"
    spool: str | None = None
    say: Callable[[str], Any] = print
    ranks: Ranks = ALONE
    twins: Twins = field(init=False)  # empty but for asymmetric inputs
    begun: bool = field(default=False, init=False)  # whether something may be swapped

    @property
    def used(self) -> Sequence[int]:
        """Numbers of the batches that this rank has to run at all."""
        numbers = self.ranks.mine(range(len(self.calls)))
        return numbers if self.watches else [number for number in self.measured if number in numbers]

    @torch.no_grad()
    def run(self, layout: Layout) -> None:
        """Do all units of ``layout`` that are not done.

        Raises:
            NotStreamableError: a batch calls a list's blocks differently from the recorded ones; units in front of it are done.
        """
        together = [layout.units] if self.inputs == "float" else [[unit] for unit in layout.units]
        with closing(Spool(self.spool)) as self.store:
            self.twins = self._twins(layout) if self.inputs == "asymmetric" and not self.begun else self._none()
            self.begun = True
            for units in together:
                self._begin(units, layout)

    def _none(self) -> Twins:
        return Twins({}, (), self.store, self.residency.device)

    def _twins(self, layout: Layout) -> Twins:
        """Of all segments that are not done, and of linears outside them but those of whole lists, which are too many to keep."""
        self.say("first inputs")
        feeds = {id(u): self._feed(u) for u in layout.units if isinstance(u, Segment) and not self._done(u)}
        outside = [u for u in layout.units if isinstance(u, Outside) and not self._done(u)]
        lists = tuple(f"{where}." for where in layout.refused)
        wanted = {f for f, watch in self.watches.items() if watch.hessian and not f.startswith(lists)}
        linears = [f for u in outside for f in u.linears if f in wanted]
        twins = Twins(feeds, linears, self.store, self.residency.device)
        until = layout.until([u for u in outside if set(u.linears) & set(linears)]) if linears else None
        if feeds or linears:
            twins.take(self.model, ((number, self.calls[number]) for number in self.used), until, self.ranks)
        return twins

    def _begin(self, units: Sequence[Segment | Outside], layout: Layout) -> None:
        """Run the forwards that these units start from, then the units."""
        feeds = {id(u): self._feed(u) for u in units if isinstance(u, Segment) and not self._done(u)}
        outside = [u for u in units if isinstance(u, Outside) and not self._done(u)]
        observed = [fqn for unit in outside for fqn in unit.linears]
        if feeds or any(fqn in self.watches for fqn in observed):
            self.say("first inputs")
            until = layout.until(outside) if any(fqn in self.watches for fqn in observed) else None
            seen = self._observers(observed, self.twins.inputs)
            calls = ((number, self.calls[number]) for number in self.used)
            with observe(self.model, seen):
                capture(self.model, list(feeds.values()), self.twins.tell(seen, calls), until, self.ranks)
            found = self._joined(observed, seen)
        else:
            found = {}
        # all of them before the first is swapped: forwards of the whole model see it as it was
        ready = [(unit, *self._outside(unit, found)) for unit in outside]
        for _, built, losses in ready:
            self.worker.swap(built, losses)
        for unit in (u for u in units if isinstance(u, Outside)):
            self.worker.restore(unit.linears)
        for unit in (u for u in units if isinstance(u, Segment)):
            self._segment(unit, feeds.get(id(unit)))

    def _feed(self, segment: Segment) -> Feed:
        return Feed(segment, self.context, self.store, self.residency.device)

    def _inside(self, block: str) -> list[str]:
        return [fqn for fqn in self.linears if fqn.startswith(f"{block}.")]

    def _done(self, unit: Segment | Outside) -> bool:
        if isinstance(unit, Outside):
            return self.worker.finished(unit.linears)
        return all(self.worker.finished(inside) for b in unit.blocks if (inside := self._inside(b.name)))

    def _observers(self, linears: Iterable[str], paired: Container[str] = ()) -> dict[str, Observer]:
        return {f: Observer(self.watches[f], self.context, f in paired) for f in linears if f in self.watches}

    def _observing(self, linears: Iterable[str]) -> Any:
        return observe(self.model, self._observers(linears))

    def _joined(self, linears: Sequence[str], seen: Mapping[str, Observer], first: int = 0) -> dict[str, InputStatistics]:
        """What all ranks saw."""
        owners = self.worker.owners(linears, first) if seen else {}
        return joined.statistics(self.ranks, {f: o.seen for f, o in seen.items()}, owners)

    def _outside(self, unit: Outside, seen: Mapping[str, InputStatistics]) -> tuple[dict[str, PackedLinear], dict[str, Loss]]:
        self.say(unit.linears[0])
        built = self.worker.solve(unit.linears, seen)
        with self._measuring(built) as meters:
            for number in self.measured if meters else ():
                if number in self.used:
                    self.calls[number]()
        return built, self._losses(meters)

    def _segment(self, segment: Segment, feed: Feed | None) -> None:
        together = self.ranks.size if self.inputs == "float" else 1
        waiting: list[_Waiting] = []
        for number, block in enumerate(segment.blocks):
            inside = self._inside(block.name)
            last = number == len(segment.blocks) - 1
            if feed is None or (inside and self.worker.finished(inside)):
                self._repeat(number, inside, feed, last)
                continue
            self.say(block.name)
            with self.residency.resident(block.name):
                if together == 1:
                    self._block(feed, number, inside, last)
                else:
                    waiting.append(self._observed(feed, number, inside, last, len(waiting)))
            if len(waiting) == together:
                self._side_by_side(waiting)
                waiting = []
        self._side_by_side(waiting)

    def _observed(self, feed: Feed, number: int, inside: list[str], last: bool, place: int) -> _Waiting:
        """A block that is solved later: what is known of it when the stream goes on."""
        new: dict[int, list[Any]] = {}
        with self._observing(inside) as observers:
            if observers or not last:
                new = dict(self._outputs(feed, number, keep=not last))
        measured = [feed.later(number, batch) for batch in feed.batches if batch in self.measured] if inside else []
        feed.advance(number, new)
        return _Waiting(feed.segment.blocks[number].name, inside, self._joined(inside, observers, place), measured)

    def _side_by_side(self, waiting: Sequence[_Waiting]) -> None:
        """Solve blocks, each rank its linears of all of them; measure and swap one after the other."""
        for block in waiting:
            self.say(block.name)
            self.worker.solve_mine(block.linears, block.seen)  # of an offloaded block these weights alone are moved
        if waiting:
            self.worker.exchange()
        for block in waiting:
            with self.residency.resident(block.name):
                built = self.worker.solve(block.linears, block.seen) if block.linears else {}
                with self._measuring(built) as meters:
                    for call in block.measured if meters else ():
                        call(self.model)
                self.worker.swap(built, self._losses(meters))

    def _repeat(self, number: int, inside: list[str], feed: Feed | None, last: bool) -> None:
        """A block that an earlier run has finished: swap, and run it for the next one's inputs."""
        after = self.inputs != "float"
        twin = None if feed is None else self.twins.feed(feed.segment)
        if twin is not None and not last:
            with self.residency.resident(twin.segment.blocks[number].name):
                twin.advance(number, dict(self._outputs(twin, number)))
        if inside and after:
            self.worker.restore(inside)
        if feed is not None and not last:
            with self.residency.resident(feed.segment.blocks[number].name):
                feed.advance(number, dict(self._outputs(feed, number)))
        if inside and not after:
            self.worker.restore(inside)

    def _block(self, feed: Feed, number: int, inside: list[str], last: bool) -> None:
        after, learns = self.inputs != "float", bool(self.worker.learns(inside))
        twin = self.twins.feed(feed.segment)
        observers = self._observers(inside, () if twin is None else inside)
        new: dict[int, list[Any]] = {}
        wanted = new if twin is None else {}  # that the block is to return, where rounding is learned
        if twin is not None:
            given = wanted if learns else None
            new = dict(self.twins.outputs(self.model, feed, number, observers, not last, given))
        elif observers or learns or not (last or after):
            with observe(self.model, observers):
                new.update(self._outputs(feed, number, keep=learns or not (last or after)))
        built = self.worker.solve(inside, self._joined(inside, observers)) if inside else {}
        if learns:
            built = self._learn(feed, number, inside, wanted)
        with self._measuring(built) as meters:
            for batch in [b for b in feed.batches if b in self.measured] if meters else ():
                feed.call(self.model, number, batch)
        self.worker.swap(built, self._losses(meters))
        if twin is not None:
            twin.advance(number, new)
        if after or last:
            feed.drop(wanted)
            new = {} if last else dict(self._outputs(feed, number))
        feed.advance(number, new)

    def _learn(self, feed: Feed, number: int, inside: list[str], wanted: Mapping[int, list[Any]]) -> dict[str, PackedLinear]:
        """The block's linears, rounded by what the block returns; it is still in floating point, and returned ``wanted``."""
        learned = self.worker.learns(inside)
        language, row_weights = self.language[learned[0]], self.watches[learned[0]].row_weights

        def loss(batch: int) -> Tensor:
            result = result_of(feed.call(self.model, number, batch))
            wide = result.to(torch.promote_types(result.dtype, torch.float32))
            error = wide - self.store.get(wanted[batch][0], self.residency.device)
            with feed.during(batch):
                rows = weighted_rows(error, language, self.context, row_weights)
            losses = [weight * part.square().sum() for weight, part in rows]
            return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

        return self.worker.learn(inside, feed.segment.blocks[number].name, loss, feed.batches)

    def _outputs(self, feed: Feed, number: int, keep: bool = True) -> Iterator[tuple[int, list[Any]]]:
        for batch in feed.batches:
            output = feed.call(self.model, number, batch)
            yield batch, feed.outputs(output) if keep else []

    def _measuring(self, built: Mapping[str, PackedLinear]) -> Any:
        linears = {name: self.model.get_submodule(name) for name in built}
        return observe(self.model, {Call(n): Meter(linears[n], q, self.language[n], self.context) for n, q in built.items()})

    def _losses(self, meters: Mapping[Call, Meter]) -> dict[str, Loss]:
        return joined.losses(self.ranks, {place.module: meter.loss for place, meter in meters.items()})
