"""Channel spaces: sets of coordinates that must be transformed together, and everything that touches them.

A space of width n is a list of n coordinate classes.  Each *touch* is an axis of a weight on which the space lies, one
or several times over (a GQA output projection reads the same head channels once per query head, a patch merger the
same channels once per patch): ``groups[copy, i]`` is the index on that axis of the i-th coordinate of a copy.

In row-vector convention an orthogonal R changes a space from x to x R.  Writers then store v R along the touched axis
and readers W R along theirs, so one function serves both:  W[..., groups] <- W[..., groups] @ R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.collections_off import without_collections
from mmqc.graph.kinds import kind
from mmqc.graph.memory import written
from mmqc.graph.plan import Plan
from mmqc.graph.program import Program
from mmqc.graph.semantic import layer_norm, rms_norm
from mmqc.graph.spaces.coordinate_rules import coordinates
from mmqc.graph.spaces.coordinates import MEAN, Coordinates, Reader, Source, compact
from mmqc.graph.spaces.rows import APART
from mmqc.graph.spaces.space import Space, Touch
from mmqc.graph.spaces.uses import pin_other_uses


class Spaces:
    """The channel spaces of a program, and where each weight axis lies; build with ``Spaces.of(prog)``."""

    def __init__(self, found: Coordinates, classes: Tensor, spaces: list[Space], in_place: set[fx.Node], pinned: bool) -> None:
        self.found, self.classes, self.spaces, self.written, self.pinned = found, classes, spaces, in_place, pinned

    def __iter__(self) -> Iterator[Space]:
        return iter(self.spaces)

    def __str__(self) -> str:
        return "\n".join(line for space in self.spaces for line in (f"{space}", *(f"    {t}" for t in space.touches)))

    def made_by(self, source: Source) -> list[fx.Node]:
        """The nodes that write what a source stands for: a gain is one for all calls of its norm."""
        calls = [g.node for g in self.found.gains if g.source is source]
        return calls or [source.node]

    @classmethod
    def of(cls, prog: Program, through_norms: bool = True, pins: bool = True) -> Spaces:
        """Analyse ``prog``: replay it, join and split its coordinates, collect the spaces.

        Passes that change weights and not the graph share one analysis.  ``through_norms`` is the question of rotations: a
        norm's output lies on its input's space (a LayerNorm's for rotations that map constant vectors to themselves), and in
        a fragment the spaces are those that the plan rotates.  Without it, that of the folds, a norm's output is a space of
        its own, and it does not matter whether the norm takes the mean away.  Without ``pins``, for who asks where weights lie
        and rotates nothing, spaces are not searched for what pins them: all else is the same, at a third of the cost.
        """
        plan = prog.plan if through_norms else None
        number = {n: i for i, n in enumerate(prog.graph.nodes)}
        ends = () if through_norms else (layer_norm, rms_norm)
        what = (("norm" if n.target in ends else n.target, *map(number.get, n.all_input_nodes)) for n in number)
        fingerprint = hash((id(plan), through_norms, *what))
        if prog.analysis is None or prog.analysis[0] != fingerprint or not prog.analysis[1].pinned >= pins:
            prog.analysis = None  # a large model's takes a gigabyte: never hold two
            with without_collections():
                prog.analysis = (fingerprint, cls._analysed(prog, plan, through_norms, pins))
        return prog.analysis[1]

    @classmethod
    def _analysed(cls, prog: Program, plan: Plan | None, through_norms: bool, pins: bool) -> Spaces:
        collector = _collected(prog, plan, through_norms, rows=pins)
        copies = collector.copies_of(lambda s: bool(s.readers if through_norms else s.mean_pins)) if pins else None
        if copies is not None:
            collector = _collected(prog, plan, through_norms, copies)
        found, spaces = collector.found, collector.spaces
        found.frozen.clear()
        found.meetings.clear()
        if pins:
            pin_other_uses(prog, found, spaces)
        return cls(found, collector.classes, spaces, written(prog), pins)


def _classes(found: Coordinates) -> Tensor:
    """Union-find by pointer jumping: one class number per coordinate, ordered by smallest member."""
    label = torch.arange(found.total)
    if found.joins:
        a, b = torch.cat(found.joins, 1).long()
        while True:
            la, lb = label[a], label[b]
            if torch.equal(la, lb):
                break
            label.scatter_reduce_(0, torch.maximum(la, lb), torch.minimum(la, lb), "amin")
            while not torch.equal(label, label[label]):
                label = label[label]
    root = label == torch.arange(found.total)
    return (root.cumsum(0) - 1)[label]


def _blocks(found: Coordinates, classes: Tensor, plan: Plan | None) -> Tensor:
    """A number per class; classes with the same number met the same things everywhere."""
    count = int(classes.max()) + 1 if classes.numel() else 0
    mark = torch.zeros(count, dtype=torch.long)
    events = [*found.splits]
    for source in found.sources:
        ids = torch.arange(source.base, source.base + source.size)
        events.append((ids, torch.full((source.size,), 3 + len(source.what))))
        if plan is not None and source.fqn:
            events.extend(plan.events(source.fqn, source.axis, ids))
    for reader in found.readers:
        if plan is not None and reader.ids is not None and reader.fqn:
            events.extend(plan.events(reader.fqn, reader.axis, reader.ids))
    for ids, _, _ in found.frozen:
        events.append((ids, torch.full(ids.shape, 5)))
    factors = torch.randint(1 << 61, (len(events),), generator=torch.Generator().manual_seed(0)) * 2 + 1
    for (ids, weight), factor in zip(events, factors.tolist(), strict=True):
        # a random linear sketch, in wrapping arithmetic: equal sums everywhere, equal marks
        mark.index_add_(0, classes[ids.long()], (weight + 1) * factor)
    number = mark.unique(return_inverse=True)[1]
    blocks = int(number.max()) + 1 if count else 0
    first = torch.full((blocks,), count).scatter_reduce_(0, number, torch.arange(count), "amin")
    return first.argsort().argsort()[number]  # in the order in which they appear


class _Collector:
    """Sorts sources and readers into spaces."""

    def __init__(self, found: Coordinates, classes: Tensor, blocks: Tensor) -> None:
        self.found, self.classes, self.blocks = found, classes, blocks
        self.copies: list[tuple[int, Tensor]] = []  # spaces that one source writes more than once, and its ids
        count = int(blocks.max()) + 1 if blocks.numel() else 0
        members = blocks.argsort(stable=True).split(blocks.bincount(minlength=count).tolist())
        self.spaces = [Space(len(m), m) for m in members]
        self.position = torch.zeros(len(blocks), dtype=torch.long)
        for m in members:
            self.position[m] = torch.arange(len(m))

    def numbers(self, ids: Tensor) -> list[int]:
        """Numbers of the spaces that these ids lie on."""
        ids = compact(ids)[0]  # logits are as many as tokens times words, and alike for all tokens
        known = ids[ids >= 0].long()
        blocks = self.blocks[self.classes[known]]
        if not known.numel() or bool((blocks == blocks[0]).all()):
            return blocks[:1].tolist()
        return blocks.unique().tolist()

    def placed(self, ids: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """For each space on an axis with these ids, where its copies lie, [copies, n]; None if a copy is incomplete."""
        there = ids >= 0
        index = torch.arange(len(ids)) if there.all() else there.nonzero().flatten()
        classes = self.classes[ids[index].long() if len(index) < len(ids) else ids]
        blocks, position = self.blocks[classes], self.position[classes]
        if len(index) and bool((blocks == blocks[0]).all()):
            number = int(blocks[0])
            if torch.equal(position, torch.arange(self.spaces[number].width)):
                yield number, index[None]
                return
        order = (blocks * (1 << 40) + position).argsort(stable=True)
        numbers, counts = blocks[order].unique_consecutive(return_counts=True)
        parts = zip(index[order].split(counts.tolist()), position[order].split(counts.tolist()), strict=True)
        for number, (part, places) in zip(numbers.tolist(), parts, strict=True):
            width = self.spaces[number].width
            copies, rest = divmod(len(part), width)
            whole = not rest and bool((places.reshape(width, -1) == torch.arange(width)[:, None]).all())
            yield number, part.reshape(width, copies).t().contiguous() if whole else None

    def source(self, source: Source) -> None:
        """A weight axis that writes, a graph input, or an operation."""
        ids = torch.arange(source.base, source.base + source.size)
        for number, groups in self.placed(ids):
            space = self.spaces[number]
            if groups is not None and len(groups) > 1:
                self.copies.append((number, source.base + groups))
            if source.what == "input":
                space.inputs.append(source.node)
            elif not source.fqn or source.what == "gain":
                space.made.append(source)
                if source.fqn and groups is not None and len(groups) == 1:
                    space.gains[source.fqn] = groups[0]
            elif groups is None:
                space.pins.append((source.node, "incomplete on a weight axis"))
            else:
                space.touch(Touch(source.fqn, source.axis, groups, "writer", source.node))

    def copies_of(self, matters: Callable[[Space], bool]) -> Tensor | None:
        """The number of its copy for each coordinate of the spaces that may be rotated and matter; None if none has copies."""
        free = [(self.spaces[number], ids) for number, ids in self.copies]
        found = [ids for s, ids in free if s.width > 1 and not (s.pins or s.inputs or s.outputs) and matters(s)]
        numbers = torch.zeros(self.found.total, dtype=torch.long)
        for ids in found:
            numbers[ids] = torch.arange(len(ids))[:, None]
        return numbers if found else None

    def reader(self, reader: Reader, ids: Tensor) -> None:
        """The axis of a weight that reads."""
        for number, groups in self.placed(ids):
            if groups is None:
                self.spaces[number].pins.append((reader.node, "incomplete in a reader's columns"))
            else:
                self.spaces[number].touch(Touch(reader.fqn, reader.axis, groups, "reader", reader.node))


def _collected(
    prog: Program, plan: Plan | None, through_norms: bool, copies: Tensor | None = None, rows: bool = True
) -> _Collector:
    found = coordinates(prog, through_norms, copies, rows)
    classes = _classes(found)
    found.joins.clear()
    blocks = _blocks(found, classes, plan)
    found.splits.clear()
    collector = _Collector(found, classes, blocks)
    for source in found.sources:
        collector.source(source)
    for reader in found.readers:
        if reader.ids is not None and reader.fqn:
            collector.reader(reader, reader.ids)
    _attach(found, collector)
    return collector


def _attach(found: Coordinates, collector: _Collector) -> None:
    """Norms, pins and graph outputs."""

    def over(ids: Any) -> list[Space]:
        return [collector.spaces[n] for n in collector.numbers(ids)] if isinstance(ids, Tensor) else []

    for node, row in found.norms:
        for space in over(row):
            if kind(node) == "rms_norm":
                space.norms.append(node)
            else:
                space.mean_pins[node] = row.numel()
    for ids, node, reason in found.frozen:
        for space in over(ids) if reason != MEAN else ():
            space.pins.append((node, reason))
    _pin_apart(found, collector)
    for i, ids in enumerate(found.outputs):
        for space in over(ids):
            space.outputs.append(i)


def _pin_apart(found: Coordinates, collector: _Collector) -> None:
    """Spaces whose channels meet in other rows than they set out in."""
    for node, ids, rows in found.meetings:
        for number, groups in collector.placed(ids):
            if groups is not None and not torch.equal(rows[groups], rows[groups[:, :1]].expand(groups.shape)):
                collector.spaces[number].pins.append((node, APART))
