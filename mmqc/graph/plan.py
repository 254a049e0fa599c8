"""What the passes decided on a whole model, as plain data, so that a fragment of it can follow.

Dynamo may break a model into several graphs.  In a fragment alone a stream's other readers cannot be seen, so nothing
could be proved; the plan of the whole recording says what was proved there: which weight axes are rotated (and in which
groups), which writers have no mean, which linears have an online Hadamard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Groups = tuple[int, int, int, int, int] | list[list[int]]


@dataclass
class Plan:
    """Decisions by weight name.

    Attributes:
        rotated: name -> axis -> one entry per rotated space on it, int64 [copies, n] each.
        centred: writers whose mean over the stream was removed.
        hadamards: linears behind an online Hadamard.
    """

    rotated: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    centred: set[str] = field(default_factory=set)
    hadamards: set[str] = field(default_factory=set)

    def rotate(self, fqn: str, axis: int, groups: Tensor) -> None:
        """Note that ``groups`` of an axis were rotated."""
        self.rotated.setdefault(fqn, {}).setdefault(axis, []).append(groups.cpu())

    def is_rotated(self, fqn: str, axis: int, groups: Tensor) -> bool:
        """Whether every one of these indices lies in a rotated group of this axis."""
        there = self.rotated.get(fqn, {}).get(axis, [])
        return bool(there) and bool(torch.isin(groups, torch.cat([g.reshape(-1) for g in there])).all())

    def is_centred(self, fqn: str) -> bool:
        """Whether the whole model's plan took the mean out of this writer."""
        return fqn in self.centred

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
        return {"rotated": rotated, "centred": sorted(self.centred), "hadamards": sorted(self.hadamards)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """What ``to_dict`` wrote."""
        rotated = {f: {int(a): [_grow(g) for g in gs] for a, gs in axes.items()} for f, axes in data["rotated"].items()}
        return cls(rotated, set(data["centred"]), set(data["hadamards"]))


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
