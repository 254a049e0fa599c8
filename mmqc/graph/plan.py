"""What the passes decided on a whole model, as plain data, so that a fragment of it can follow.

Dynamo may break a model into several graphs.  In a fragment alone a stream's other readers cannot be seen, so nothing
could be proved; the plan of the whole recording says what was proved there: which weight axes are rotated (and in which
groups), which writers have no mean, which linears have an online Hadamard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmqc.graph.scaling import Scaling

Groups = tuple[int, int, int, int, int] | list[list[int]]


@dataclass(frozen=True)
class Stream:
    """A residual stream whose mean was removed.

    Attributes:
        writers: every weight that writes it, without mean now.
        roots: those that start it (a patch convolution, positions), rather than add to it as linears do.
        norms: gains of the LayerNorms over it, which became RMSNorms.
    """

    writers: tuple[str, ...]
    roots: tuple[str, ...]
    norms: tuple[str, ...]


@dataclass
class Plan:
    """Decisions by weight name.

    Attributes:
        rotated: name -> axis -> one entry per rotated space on it, int64 [copies, n] each.
        mean_kept: (name, axis) of rotated spaces whose rotation maps constant vectors to themselves.
        flipped: (name, axis) of weights some of whose channels have the other sign.
        streams: residual streams without mean.
        hadamards: linears behind an online Hadamard.
        blocks: in how many blocks, of those that have several.
        gains: linears that took in a norm's gain and bias: name -> (gain, bias or nothing,
            the value of the gain's weight that means 1, index of the gain element per column or -1).
        scalings: factors per channel that were moved from writers to readers.
        based: places of spaces that were rotated into a basis measured on data; a fragment cannot follow these.
    """

    rotated: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    mean_kept: set[tuple[str, int]] = field(default_factory=set)
    flipped: set[tuple[str, int]] = field(default_factory=set)
    streams: list[Stream] = field(default_factory=list)
    hadamards: set[str] = field(default_factory=set)
    gains: dict[str, tuple[str, str, float, Tensor]] = field(default_factory=dict)
    scalings: list[Scaling] = field(default_factory=list)
    based: set[str] = field(default_factory=set)
    blocks: dict[str, int] = field(default_factory=dict)

    def rotate(self, fqn: str, axis: int, groups: Tensor) -> None:
        """Note that ``groups`` of an axis were rotated."""
        self.rotated.setdefault(fqn, {}).setdefault(axis, []).append(groups.cpu())

    def is_rotated(self, fqn: str, axis: int, groups: Tensor) -> bool:
        """Whether every one of these indices lies in a rotated group of this axis."""
        there = self.rotated.get(fqn, {}).get(axis, [])
        return bool(there) and bool(torch.isin(groups, torch.cat([g.reshape(-1) for g in there])).all())

    def stream(self, names: Iterable[str]) -> Stream | None:
        """The stream without mean that these writers or norms belong to."""
        wanted = set(names)
        return next((s for s in self.streams if wanted & {*s.writers, *s.norms}), None)

    def events(self, fqn: str, axis: int, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Splits that keep a fragment's coordinates in the plan's groups: one number per space and copy."""
        number, mark = 1, torch.zeros(len(ids), dtype=torch.long)
        for groups in self.rotated.get(fqn, {}).get(axis, []):
            for copy in groups:
                mark[copy] = number
                number += 1
        keep = ids >= 0
        return [(ids[keep], mark[keep])] if number > 1 else []

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        rotated = {f: {str(a): [_shrink(g) for g in gs] for a, gs in axes.items()} for f, axes in self.rotated.items()}
        gains = {f: [gain, bias, neutral, _shrink(index[None])] for f, (gain, bias, neutral, index) in self.gains.items()}
        return {
            "rotated": rotated,
            "mean_kept": [list(place) for place in sorted(self.mean_kept)],
            "flipped": [list(place) for place in sorted(self.flipped)],
            "streams": [[list(part) for part in (s.writers, s.roots, s.norms)] for s in self.streams],
            "hadamards": sorted(self.hadamards),
            **({"blocks": dict(sorted(self.blocks.items()))} if self.blocks else {}),
            "gains": gains,
            "scalings": [s.to_dict() for s in self.scalings],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """What ``to_dict`` wrote."""
        rotated = {f: {int(a): [_grow(g) for g in gs] for a, gs in axes.items()} for f, axes in data["rotated"].items()}
        gains = {f: (gain, bias, neutral, _grow(index)[0]) for f, (gain, bias, neutral, index) in data["gains"].items()}
        kept, flipped = ({(f, a) for f, a in data.get(key, ())} for key in ("mean_kept", "flipped"))
        streams = [Stream(*map(tuple, s)) for s in data["streams"]]
        scalings = [Scaling.from_dict(s) for s in data.get("scalings", ())]
        hadamards, blocks = set(data["hadamards"]), dict(data.get("blocks", {}))
        return cls(rotated, kept, flipped, streams, hadamards, gains, scalings, blocks=blocks)


def _shrink(groups: Tensor) -> Any:
    """[start, copies, step between copies, n, step] where the indices run evenly, otherwise the list of lists."""
    copies, n = groups.shape
    start = int(groups[0, 0])
    between = int(groups[1, 0]) - start if copies > 1 else 0
    step = int(groups[0, 1]) - start if n > 1 else 0
    short = [start, copies, between, n, step]
    return short if torch.equal(_grow(short), groups) else groups.tolist()


def _grow(data: Any) -> Tensor:
    if data and isinstance(data[0], list):
        return torch.tensor(data)
    start, copies, between, n, step = data
    return start + torch.arange(copies)[:, None] * between + torch.arange(n) * step
