"""Who does which of some items of unequal cost: the largest first, each to whoever has least to do (Graham's greedy rule).

max load <= (4/3 - 1/(3 n)) the best possible, for n ranks
"""

from __future__ import annotations

from collections.abc import Sequence


def owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each item; of equal loads the lowest rank's, so that all ranks find the same."""
    loads, found = [0.0] * ranks, [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        found[item] = rank
        loads[rank] += costs[item]
    return found


def part(count: int, rank: int, ranks: int) -> range:
    """The numbers, of ``count`` items in order, of one rank's part: neighbours, as many as any other's, or one more."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)
