"""What several ranks saw of their batches, put together: as if one had seen all of them.

low, high    minimum, maximum        exact
rows, counts, histograms             exact
H, drift     Σ over ranks, in their order, of float64 sums: equal to one process's unless a sum rounds (docs/adr/0031)
losses       Σ over ranks of float64 powers: within n 2^-53
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmqc.calibration.blocks import NotStreamableError
from mmqc.calibration.calibrate import InputStatistics, Range
from mmqc.calibration.measure import Loss
from mmqc.distributed.ranks import Ranks


def statistics(ranks: Ranks, seen: Mapping[str, InputStatistics], owners: Mapping[str, int]) -> dict[str, InputStatistics]:
    """The statistics of linears, by module FQN, complete.

    Args:
        ranks: who saw a part of the batches each.
        seen: by this rank; used up.
        owners: the rank that gets a linear's second moment and drift; the others have None.
    """
    for one in seen.values():
        for part in one.ranges.values():
            part.settle()
    known = ranks.collected([{name: (one.ranges, one.rows, one.paired) for name, one in seen.items()}])
    paired = {name: all(there[name][2] for there in known) for name in seen}
    moments = ranks.summed({name: one.hessian for name, one in seen.items() if one.hessian is not None}, owners)
    drifts = ranks.summed({name: one.drift for name, one in seen.items() if one.drift is not None and paired[name]}, owners)
    for name, one in seen.items():
        one.ranges = {modality: _range([there[name][0][modality] for there in known]) for modality in one.ranges}
        one.rows = sum(there[name][1] for there in known)
        one.hessian, one.drift, one.paired = moments.pop(name, None), drifts.pop(name, None), paired[name]
        one.finish()
    return dict(seen)


def _range(parts: Sequence[Range]) -> Range:
    histograms = [part.histogram for part in parts if part.histogram is not None]
    low, high = min(part.low for part in parts), max(part.high for part in parts)
    total = sum(histograms[1:], histograms[0]) if histograms else None
    return Range(low, high, sum(part.count for part in parts), total)


def losses(ranks: Ranks, own: Mapping[str, Loss]) -> dict[str, Loss]:
    """Losses by module FQN, over the batches of all ranks."""
    known = ranks.collected([dict(own)])
    found = {name: Loss() for there in known for name in there}
    for there in known:
        for name, loss in there.items():
            total = found[name]
            pairs: Any = (
                (total.signal, loss.signal),
                (total.noise, loss.noise),
                (total.clipped, loss.clipped),
                (total.count, loss.count),
            )
            for ours, theirs in pairs:
                for modality, value in theirs.items():
                    ours[modality] = ours.get(modality, 0) + value
    return found


def agree(ranks: Ranks, error: NotStreamableError | None) -> None:
    """All ranks know whether one of them met a batch that cannot be taken block by block.

    Raises:
        NotStreamableError: the first rank's that did.
    """
    found = [each for each in ranks.collected([None if error is None else (error.where, error.reason)]) if each is not None]
    if error is not None and ranks.size == 1:
        raise error
    if found:
        raise NotStreamableError(*found[0])
