"""Who does what: parts of a sequence, and items of unequal cost."""

from __future__ import annotations

import itertools

import pytest

from mmqc.distributed.packing import owners, part


@pytest.mark.parametrize(("count", "ranks"), [(7, 2), (3, 4), (0, 3), (8, 4), (5, 1)])
def test_part__covers_everything_once_in_order_and_evenly(count, ranks):
    parts = [part(count, rank, ranks) for rank in range(ranks)]
    assert list(itertools.chain(*parts)) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_owners__largest_first_to_whoever_has_least():
    assert owners([1, 8, 3, 3, 2], 2) == [0, 0, 1, 1, 1]
    assert owners([], 3) == []


def test_owners__within_four_thirds_of_the_best():
    costs = [7.0, 7, 6, 6, 5, 5, 4, 4, 4]
    loads = [sum(c for c, o in zip(costs, owners(costs, 3), strict=True) if o == rank) for rank in range(3)]
    assert max(loads) <= (4 / 3 - 1 / 9) * sum(costs) / 3
