"""Run a model block by block: the first block's arguments come from forwards of the model, the others' from its outputs.

    capture     whole forwards, stopped as soon as every block that meets new arguments has been called
    Feed        for one segment: what its next block takes, batch by batch

Nothing recorded is replayed: blocks are called as modules, with the arguments that the model's own code made for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mmqc.calibration.blocks import KEPT, PLAIN, STREAM, Block, NotStreamableError, Segment, leaves_of
from mmqc.calibration.joined import agree
from mmqc.calibration.observe import Call, observe
from mmqc.calibration.spool import Spool
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.nn.modality import ModalityContext


class _Enough(Exception):  # noqa: N818  (it is no error)
    """All that a forward was run for has been seen."""


def result_of(output: Any) -> Tensor:
    """What a block returns: attention weights, if any, are behind it."""
    return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


class Feed:
    """The arguments of a segment's blocks; ``advance`` makes the outputs of one the inputs of the next.

    Attributes:
        batches: numbers of the batches that reached the segment.
    """

    def __init__(self, segment: Segment, context: ModalityContext | None, spool: Spool, device: torch.device) -> None:
        self.segment, self.context, self.spool, self.device = segment, context, spool, device
        self.kept: dict[int, dict[int, Any]] = {}
        self.visual: dict[int, Tensor | None] = {}
        self.stream: dict[int, list[Any]] = {}
        self.last_use = segment.last_use()

    @property
    def batches(self) -> list[int]:
        """Numbers of the batches that reached the segment, in order."""
        return sorted(self.kept)

    def take(self, batch: int, block: Block, args: Any, kwargs: Any) -> None:
        """Store what ``block`` meets first in a forward; raises NotStreamableError."""
        where = self.segment.where
        leaves, spec = leaves_of(where, args, kwargs)
        if spec != block.spec or any(
            s.kind == PLAIN and (type(s.value) is not type(v) or s.value != v) for s, v in zip(block.sources, leaves, strict=True)
        ):
            raise NotStreamableError(where, f"batch {batch} calls {block.name} with other arguments than the recorded ones")
        kept = self.kept.setdefault(batch, {})
        kept.update({index: self.spool.put(leaves[leaf]) for leaf, index in block.meets})
        if self.context is not None:
            visual = self.context.visual
            self.visual[batch] = None if visual is None else visual.clone()

    def arguments(self, number: int, batch: int) -> tuple[Any, Any]:
        """(args, kwargs) of the segment's block ``number``."""
        block = self.segment.blocks[number]
        stores = {STREAM: self.stream.get(batch, ()), KEPT: self.kept[batch]}
        leaves = [s.value if s.kind == PLAIN else self.spool.get(stores[s.kind][s.value], self.device) for s in block.sources]
        return pytree.tree_unflatten(leaves, block.spec)

    def call(self, model: nn.Module, number: int, batch: int) -> Any:
        """Call the block ``number`` on its arguments, with the visual mask of the batch."""
        args, kwargs = self.arguments(number, batch)
        block = model.get_submodule(self.segment.blocks[number].name)
        with self.during(batch):
            return block(*args, **kwargs)

    def during(self, batch: int) -> AbstractContextManager[None]:
        """As within a call of the model with this batch: its visual mask is the current one."""
        return nullcontext() if self.context is None else self.context.during(self.visual.get(batch))

    def later(self, number: int, batch: int) -> Callable[[nn.Module], Any]:
        """``call`` on what the arguments are now, once, however far the stream has advanced by then."""
        leaves, spec = pytree.tree_flatten(self.arguments(number, batch))
        tickets, visual = [self.spool.put(leaf) for leaf in leaves], self.visual.get(batch)

        def call(model: nn.Module) -> Any:
            args, kwargs = pytree.tree_unflatten([self.spool.get(t, self.device) for t in tickets], spec)
            for ticket in tickets:
                self.spool.drop(ticket)
            with nullcontext() if self.context is None else self.context.during(visual):
                return model.get_submodule(self.segment.blocks[number].name)(*args, **kwargs)

        return call

    def outputs(self, output: Any) -> list[Any]:
        """Tickets of a block's output."""
        return [self.spool.put(t) for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]

    def drop(self, outputs: Mapping[int, list[Any]]) -> None:
        """Forget the outputs of all batches."""
        for tickets in outputs.values():
            for ticket in tickets:
                self.spool.drop(ticket)

    def advance(self, number: int, new: Mapping[int, list[Any]]) -> None:
        """``new`` are the outputs of block ``number``; what no later block reads is dropped."""
        self.drop(self.stream)
        self.stream = dict(new)
        for kept in self.kept.values():
            for index in [i for i in kept if self.last_use[i] <= number]:
                self.spool.drop(kept.pop(index))


def capture(
    model: nn.Module,
    feeds: Sequence[Feed],
    calls: Iterable[tuple[int, Callable[[], Any]]],
    until: str | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Fill ``feeds`` from forwards of the model.

    Args:
        model: whose blocks are observed.
        feeds: of the segments to start.
        calls: (number of the batch, its forward), those of this rank.
        until: FQN of a block before whose call no forward is stopped, because hooks of others need that; empty: not at all.
        ranks: all raise if one of them does.

    Raises:
        NotStreamableError: a batch calls a block differently from the recorded batches.
    """
    meeting = {block.name: (feed, block) for feed in feeds for block in feed.segment.blocks if block.meets}
    awaited = meeting.keys() | ({until} if until is not None else set())
    batch, left = 0, set(awaited)

    def take(name: str, args: Any, kwargs: Any) -> None:
        if name in meeting:
            feed, block = meeting[name]
            feed.take(batch, block, args, kwargs)
        left.discard(name)
        if not left:
            raise _Enough

    error = None
    with observe(model, {Call(name): partial(take, name) for name in awaited if name}):
        try:
            for number, call in calls:
                batch, left = number, set(awaited)
                with suppress(_Enough):
                    call()
        except NotStreamableError as unlike:
            error = unlike
    agree(ranks, error)
