"""What the floating-point model feeds blocks and linears, for a run that compares with it (inputs="asymmetric").

    feeds     of segments: the inputs go from block to block, beside those that the quantized blocks make
    inputs    of linears outside all blocks: of all calls of all batches

Both are taken by forwards of the whole model before anything in it is swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.calibration.blocks import Segment
from mmqc.calibration.calibrate import Observer
from mmqc.calibration.observe import observe
from mmqc.calibration.spool import Spool
from mmqc.calibration.stream import Feed, capture, result_of
from mmqc.distributed.ranks import Ranks
from mmqc.solvers.asymmetric import SHARE

Calls = Iterable[tuple[int, Callable[[], Any]]]


class Twins:
    """See the top of the file.

    Args:
        feeds: by the id of their segment, empty.
        linears: module FQNs of linears outside all blocks.
        spool: keeps their inputs.
        device: where they are wanted.
    """

    def __init__(self, feeds: Mapping[int, Feed], linears: Iterable[str], spool: Spool, device: torch.device) -> None:
        self.feeds, self.spool, self.device = feeds, spool, device
        self.inputs: dict[str, dict[int, list[Any]]] = {fqn: {} for fqn in linears}
        self.batch = 0

    def take(self, model: nn.Module, calls: Calls, until: str | None, ranks: Ranks) -> None:
        """Run the forwards; the arguments are ``capture``'s."""
        with observe(model, {fqn: partial(self._keep, fqn) for fqn in self.inputs}):
            capture(model, list(self.feeds.values()), self._numbered(calls), until, ranks)

    def feed(self, segment: Segment) -> Feed | None:
        """The segment's, if it was taken."""
        return self.feeds.get(id(segment))

    def tell(self, observers: Mapping[str, Observer], calls: Calls) -> Iterator[tuple[int, Callable[[], Any]]]:
        """``calls``, before each of which the observers of linears outside all blocks are told what to expect."""
        for number, call in calls:
            for fqn, observer in observers.items():
                observer.expected.clear()
                for ticket in self.inputs.get(fqn, {}).pop(number, ()):
                    observer.expect(self.spool.get(ticket, self.device))
                    self.spool.drop(ticket)
            yield number, call

    def outputs(
        self,
        model: nn.Module,
        feed: Feed,
        number: int,
        observers: Mapping[str, Observer],
        keep: bool,
        wanted: dict[int, list[Any]] | None = None,
    ) -> Iterator[tuple[int, list[Any]]]:
        """What a block, still in floating point, makes of the floating-point inputs, batch by batch, once it was called for both.

        Args:
            model: whose block is called.
            feed: of the same segment, with the inputs that the quantized blocks make.
            number: of the block in its segment.
            observers: of linears in the block; they see both.
            keep: whether outputs are asked for.
            wanted: gets what the block is to return once it is quantized, by batch: as far from what it makes of the quantized
                inputs to what it makes of the others as a linear's target is (solvers/asymmetric.py).
        """
        twin = self.feeds[id(feed.segment)]
        for batch in twin.batches:
            for observer in observers.values():
                observer.expected.clear()
            with observe(model, {fqn: observer.expect for fqn, observer in observers.items()}):
                found = twin.call(model, number, batch)
            if observers or wanted is not None:
                with observe(model, observers):
                    own = result_of(feed.call(model, number, batch))
                if wanted is not None:
                    wanted[batch] = [self.spool.put(own + SHARE * (result_of(found) - own))]
            yield batch, twin.outputs(found) if keep else []

    def _keep(self, fqn: str, x: Tensor) -> None:
        self.inputs[fqn].setdefault(self.batch, []).append(self.spool.put(x))

    def _numbered(self, calls: Calls) -> Iterator[tuple[int, Callable[[], Any]]]:
        for number, call in calls:
            self.batch = number
            yield number, call
