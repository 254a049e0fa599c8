"""What ranks saw, put together, is what one process sees of all batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mmqc.calibration import joined
from mmqc.calibration.blocks import NotStreamableError
from mmqc.calibration.calibrate import Observer, Watch
from mmqc.calibration.measure import Loss
from mmqc.config import ActivationSpec
from mmqc.distributed.ranks import ALONE, Ranks

PERCENTILE = ActivationSpec(observer="percentile", percentile=0.99)


class Second(Ranks):
    """The second of two ranks; what the first one gives is known."""

    rank, size = 1, 2

    def __init__(self, first: Any, moment: torch.Tensor | None = None) -> None:
        self.theirs, self.moment = first, moment

    def collected(self, own: Sequence[Any]) -> Sequence[Any]:
        return [self.theirs, *own]

    def summed(self, parts: Any, owners: Any = None) -> Any:
        return {name: part + self.moment for name, part in parts.items() if owners is None or owners[name] == self.rank}


def seen(xs: list[torch.Tensor]) -> Any:
    observer = Observer(Watch(False, PERCENTILE, True), None)
    for x in xs:
        observer.update(x)
    for part in observer.seen.ranges.values():
        part.settle()
    return observer.seen


def test_statistics__of_two_ranks_are_those_of_one():
    xs = [torch.randn(30, 8) * scale for scale in (1, 3, 2)]
    whole = joined.statistics(ALONE, {"up": seen(xs)}, {"up": 0})["up"]
    first = seen(xs[:1])
    ranks = Second({"up": (first.ranges, first.rows, first.paired)}, first.hessian)
    both = joined.statistics(ranks, {"up": seen(xs[1:])}, {"up": 1})["up"]
    assert both.rows == whole.rows == 90
    assert torch.equal(both.hessian, whole.hessian)
    for name, part in whole.ranges.items():
        found = both.ranges[name]
        assert (found.low, found.high, found.count) == (part.low, part.high, part.count)
    assert torch.equal(both.ranges["visual"].histogram, whole.ranges["visual"].histogram)
    assert both.scales(PERCENTILE, False) == whole.scales(PERCENTILE, False)


def test_statistics__only_the_owner_has_the_second_moment():
    first = seen([torch.randn(4, 8)])
    ranks = Second({"up": (first.ranges, first.rows, first.paired)}, first.hessian)
    both = joined.statistics(ranks, {"up": seen([torch.randn(4, 8)])}, {"up": 0})["up"]
    assert both.hessian is None
    assert both.rows == 8


def paired(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    observer = Observer(Watch(False, None, True), None, paired=True)
    for x, y in pairs:
        observer.expect(x)
        observer.update(y)
    return observer.seen


@pytest.mark.parametrize("unlike", [None, "first", "second"])
def test_statistics__a_drift_is_that_of_all_ranks_or_none(unlike: str | None):
    pairs = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(3)]
    whole = joined.statistics(ALONE, {"up": paired(pairs)}, {"up": 0})["up"]
    other = [(torch.randn(5, 8), torch.randn(6, 8))]
    first, second = (paired(own + other * (unlike == name)) for own, name in ((pairs[:1], "first"), (pairs[1:], "second")))
    ranks = Second({"up": (first.ranges, first.rows, first.paired)}, torch.zeros(8, 8) if unlike else first.drift)
    both = joined.statistics(ranks, {"up": second}, {"up": 1})["up"]
    assert both.paired == (unlike is None)
    assert both.drift is None if unlike else torch.equal(both.drift, whole.drift)


def test_losses__are_added_also_those_of_linears_that_this_rank_did_not_see():
    first = {"up": Loss({"text": 8.0}, {"text": 1.0}, {"text": 2}, {"text": 10}), "down": Loss({"text": 1.0})}
    found = joined.losses(Second(first), {"up": Loss({"text": 2.0, "visual": 5.0}, {"text": 1.0}, {"text": 1}, {"text": 10})})
    assert found["up"] == Loss({"text": 10.0, "visual": 5.0}, {"text": 2.0}, {"text": 3}, {"text": 20})
    assert found["down"] == Loss({"text": 1.0})


def test_agree__all_raise_what_one_has_met():
    joined.agree(ALONE, None)
    joined.agree(Second(None), None)
    own = NotStreamableError("layers", "own reason")
    with pytest.raises(NotStreamableError) as caught:
        joined.agree(ALONE, own)
    assert caught.value is own
    with pytest.raises(NotStreamableError, match="layers: theirs"):
        joined.agree(Second(("layers", "theirs")), own)
