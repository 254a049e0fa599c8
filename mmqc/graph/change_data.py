"""``Program.history`` as plain JSON data: every table of numbers once, however many weights it went into.

{"tables": [[dtype, shape, base64], ...], "weights": {fqn: [step, ...]}}
step        ["times", axis, groups, table] | ["centred", axis, groups] | ["turned", axis, groups, width, seed, keep_mean]
["based", axis, groups, table] | ["spread", axis, width] | ["moved", axis, groups, table] | ["unknown", formula]
groups      [copies, [start, length], ...]: stretches of the flattened groups; null where the axis is one
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmqc.graph.changes import Based, Centred, Moved, Placed, Spread, Step, Times, Turned, Unknown
from mmqc.graph.scaling import listed, runs

KEPT = 512  # channels of a measured basis: n x n numbers of eight bytes


def to_data(history: Mapping[str, Sequence[Step]]) -> dict[str, Any]:
    """The history of these weights."""
    tables = _Tables()
    weights = {fqn: [_step(step, tables) for step in steps] for fqn, steps in history.items()}
    return {"tables": tables.data, "weights": weights}


def from_data(data: Mapping[str, Any], fqn: str) -> list[Step]:
    """What ``to_data`` wrote of one weight; nothing for a weight that it does not know."""
    return [_READ[kind](data["tables"], *rest) for kind, *rest in data["weights"].get(fqn, ())]


class _Tables:
    """Tables by content; float32 where that holds the numbers exactly."""

    def __init__(self) -> None:
        self.data: list[list[Any]] = []
        self.known: dict[bytes, int] = {}

    def add(self, table: Tensor) -> int:
        """Its number."""
        wide = table.detach().cpu().double()
        narrow = wide.float()
        kept = narrow if torch.equal(narrow.double(), wide) else wide
        raw = kept.contiguous().numpy().tobytes()
        key = hashlib.sha256(raw + repr((kept.dtype, kept.shape)).encode()).digest()
        if key not in self.known:
            self.known[key] = len(self.data)
            dtype = "float32" if kept.dtype == torch.float32 else "float64"
            self.data.append([dtype, list(kept.shape), base64.b64encode(raw).decode("ascii")])
        return self.known[key]


def _table(tables: Sequence[Any], number: int) -> Tensor:
    dtype, shape, text = tables[number]
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=getattr(torch, dtype)).reshape(shape).double()


def _groups(groups: Tensor | None) -> Any:
    return None if groups is None else [len(groups), *runs(groups.reshape(-1))]


def _grown(data: Any) -> Tensor | None:
    return None if data is None else listed(data[1:]).reshape(data[0], -1)


def _step(step: Step, tables: _Tables) -> list[Any]:
    if isinstance(step, Unknown):
        return ["unknown", step.formula]
    where = (step.axis, _groups(step.groups))
    if isinstance(step, Moved):
        return ["moved", *where, tables.add(step.beta)]
    change = step.change
    if isinstance(change, Times):
        return ["times", *where, tables.add(change.factors)]
    if isinstance(change, Centred):
        return ["centred", *where]
    if isinstance(change, Turned):
        return ["turned", *where, len(change.signs), change.seed, change.keep_mean]
    if isinstance(change, Based) and len(change.matrix) > KEPT:
        n = len(change.matrix)
        return ["unknown", f"a basis of {n} x {n} that was measured on data and is not kept with the model"]
    if isinstance(change, Based):
        return ["based", *where, tables.add(change.matrix)]
    if isinstance(change, Spread):
        return ["spread", step.axis, change.width, *((change.blocks,) if change.blocks > 1 else ())]
    return ["unknown", repr(change)]


_READ: dict[str, Callable[..., Step]] = {
    "unknown": lambda tables, formula: Unknown(formula),
    "moved": lambda tables, axis, groups, table: Moved(axis, _must(groups), _table(tables, table)),
    "times": lambda tables, axis, groups, table: Placed(axis, _grown(groups), Times(_table(tables, table))),
    "centred": lambda tables, axis, groups: Placed(axis, _grown(groups), Centred()),
    "turned": lambda tables, axis, groups, *of: Placed(axis, _grown(groups), Turned.of(*of)),
    "based": lambda tables, axis, groups, table: Placed(axis, _grown(groups), Based(_table(tables, table))),
    "spread": lambda tables, axis, width, blocks=1: Placed(axis, None, Spread.of(width, blocks)),
}


def _must(groups: Any) -> Tensor:
    grown = _grown(groups)
    assert grown is not None
    return grown
