"""Where the time of ``quantize_`` goes on each rank, part by part: what takes as long on two ranks as on one does not divide.

    own seconds of a part    from its call to its return, without the parts that it calls itself
    waiting                  for another rank, and for what is sent

The device is waited for at both ends of a part, so nothing overlaps: the sum is more than an undisturbed run takes.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.end_to_end.quantize_speed import synchronized

REST, LATER, MEASURED = "between the parts", "calls for losses", "losses"


@dataclass
class Parts:
    """Seconds by part: ``own`` in all, ``longest`` the longest call with all that it calls, the first of which may load kernels."""

    own: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    inside: list[float] = field(default_factory=list)  # of the calls that are under way: what parts in them took

    def around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """``real``, timed."""

        @functools.wraps(real)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(0.0)
            start = synchronized()
            try:
                result = real(*args, **kwargs)
                return self.around(MEASURED, result) if name == LATER else result
            finally:
                took = synchronized() - start
                self.own[name] = self.own.get(name, 0.0) + took - self.inside.pop()
                self.calls[name] = self.calls.get(name, 0) + 1
                self.longest[name] = max(took, self.longest.get(name, 0.0))
                if self.inside:
                    self.inside[-1] += took

        return wrapped

    def of_all_ranks(self, least: float = 0.02) -> dict[str, Any]:
        """By part, the dearest first: own seconds of each rank, calls and the longest call on the first; no small ones."""
        ranks: list[Any] = [self]
        if dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, self)
        own = {name: [round(r.own.get(name, 0.0), 3) for r in ranks] for name in dict.fromkeys(n for r in ranks for n in r.own)}
        return {
            name: {"own": own[name], "calls": self.calls.get(name, 0), "longest": round(self.longest.get(name, 0.0), 3)}
            for name in sorted(own, key=lambda n: -max(own[n]))
            if max(own[name]) >= least
        }


def places() -> list[tuple[str, Any, str]]:
    """(part, owner, attribute) of everything that is timed."""
    import mmqc.calibration.joined as joined
    import mmqc.calibration.sequential as sequential
    import mmqc.calibration.stream as stream
    import mmqc.distributed.group as group
    import mmqc.passes.quantize_weights as quantize_weights
    import mmqc.quantization.channel_scales as channel_scales
    import mmqc.quantization.convert as convert
    import mmqc.quantization.equivalence as equivalence
    import mmqc.quantization.eviction as eviction
    import mmqc.quantization.job as job
    import mmqc.quantization.request as request
    import mmqc.quantization.rewrite as rewrite
    import mmqc.quantization.units as units
    import mmqc.quantize as quantize
    from mmqc.graph.spaces.spaces import Spaces

    return [
        ("arguments", request.Request, "read"),
        ("arguments of other ranks", job, "check_same"),
        ("meeting", group.Group, "__init__"),
        ("parting", group.Group, "leave"),
        ("waiting", group.Group, "_wait"),
        ("record", rewrite, "record"),
        ("spaces", Spaces, "_analysed"),
        ("rewrite", quantize, "rewrite"),
        ("passes", rewrite, "run"),
        ("incoherence", rewrite, "incoherences"),
        ("equivalence", equivalence.Before, "of"),
        ("equivalence", rewrite, "check"),
        ("write weights", convert, "write_weights"),
        ("scale channels", rewrite, "scale_channels"),
        ("search of scales", channel_scales._Search, "choose"),
        ("survey", units, "survey"),
        ("survey", channel_scales, "survey"),
        ("capture", sequential, "capture"),
        ("capture", channel_scales, "capture"),
        ("blocks", stream.Feed, "call"),
        ("activations", stream.Feed, "outputs"),
        (LATER, stream.Feed, "later"),
        ("statistics of ranks", joined, "statistics"),
        ("losses of ranks", joined, "losses"),
        ("solve", quantize_weights.QuantizeWeights, "solution"),
        ("units, rounding", units.UnitWorker, "solve_mine"),
        ("units, exchange", units.UnitWorker, "exchange"),
        ("units, graph", units.UnitWorker, "solve"),
        ("units, modules", convert, "build_quantized"),
        ("units, rows", units.UnitWorker, "put"),
        ("swap", convert.Journal, "swap"),
        ("waiting for copies", eviction.Eviction, "_make_room"),
        ("waiting for copies", eviction.Eviction, "close"),
        ("blocks on their way", job.Residency, "_bring"),
        ("blocks on their way", job.Residency, "_take_back"),
        ("units, end", units.UnitWorker, "finish"),
        ("finish", quantize, "finish"),
    ]


@contextlib.contextmanager
def timed() -> Iterator[Parts]:
    """The parts of what ``quantize_`` does meanwhile."""
    parts, kept = Parts(), []
    for name, owner, attribute in places():
        real = vars(owner)[attribute]
        if isinstance(real, classmethod):
            wrapped: Any = classmethod(parts.around(name, real.__func__))
        else:
            wrapped = parts.around(name, real)
        kept.append((owner, attribute, real))
        setattr(owner, attribute, wrapped)
    start = time.perf_counter()
    try:
        yield parts
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        parts.own[REST] = time.perf_counter() - start - sum(parts.own.values())
    finally:
        for owner, attribute, real in kept:
            setattr(owner, attribute, real)
