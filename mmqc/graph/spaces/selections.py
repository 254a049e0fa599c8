"""Rows that data chooses: an index or a mask that was computed picks other rows for another input.

    out.index_add_(0, at, expert(x[at]))      x[mask] = features      torch.where(mask, a, b)      x.masked_fill(mask, 1.0)

The recorded batch shows one choice.  What a rotation needs must hold for all: any row may come to where another came, so
the rows that an index could reach are one coordinate per channel, and what a mask could have put beside them is as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.program import LOOSE
from mmqc.graph.spaces.coordinates import CONSTANT, ZERO, Tracker, compact

READS = {"index_select": (1, 2), "gather": (1, 2), "take_along_dim": (2, 1)}  # where the axis stands, and the index
NONE = "the recorded batch put no row into it"
WRITES = {"index_copy": 3, "scatter": 3, "index_put": 2}  # where the rows stand that are put into x


def computed(node: Any) -> bool:
    """Whether a choice may differ for another input: what Python wrote down is the same each time."""
    return isinstance(node, fx.Node) and not (node.op == "get_attr" and str(node.target).startswith(LOOSE))


def join_choices(tracker: Tracker, node: fx.Node, word: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Called before a move: joins what its index or mask might have chosen instead."""
    if kwargs or len(args) < 2:
        return
    if word == "where" and len(args) == 3 and computed(node.args[0]):
        _either(tracker, node, *(tracker.ids_for(t, v) for t, v in zip(node.args[1:], args[1:], strict=True)))
    elif word == "masked_fill" and computed(node.args[1]):
        _either(tracker, node, tracker.ids_for(node.args[0], args[0]), args[2] if len(args) > 2 else 0)
    elif word == "masked_scatter" and computed(node.args[1]) and whole_rows(args[1]):
        x, rows = (tracker.ids_for(node.args[i], args[i]) for i in (0, 2))
        if x.dim() and rows.dim() and x.shape[-1] == rows.shape[-1]:
            tracker.join(row_of(tracker, x, range(x.dim() - 1)), row_of(tracker, rows, range(rows.dim() - 1)))
    elif word == "getitem":
        ids = tracker.shadow(node.args[0])
        if isinstance(ids, Tensor):
            row_of(tracker, ids, chosen_axes(node.args[1], args[1], ids.dim()))
    elif word in READS and len(args) > 2 and computed(node.args[READS[word][1]]):
        ids = tracker.shadow(node.args[0])
        if isinstance(ids, Tensor):
            row_of(tracker, ids, _one_axis(args[READS[word][0]], ids.dim()))


def join_written(tracker: Tracker, node: fx.Node, word: str, args: list[Any], ids: Any) -> Any:
    """The ids of what a move has written rows into: any row of it may be one of those that were put there."""
    if word not in WRITES or len(args) <= WRITES[word] or not isinstance(ids, Tensor):
        return ids
    if word == "index_put":
        axes = chosen_axes(node.args[1], args[1], ids.dim())
    else:
        axes = _one_axis(args[1], ids.dim()) if computed(node.args[2]) else []
    return any_row(tracker, node, ids, axes, tracker.shadow(node.args[WRITES[word]]))


def any_row(tracker: Tracker, node: fx.Node, ids: Tensor, axes: list[int], rows: Any) -> Tensor:
    """``ids`` with ``rows`` anywhere along these axes, where there were zeros; new ones if anything changes."""
    if not axes:
        return ids
    row = row_of(tracker, ids, axes)
    if isinstance(rows, Tensor) and not rows.numel():
        tracker.freeze(row, node, NONE)
    elif isinstance(rows, Tensor) and rows.dim() and rows.shape[-1] == ids.shape[-1] and len(axes) == ids.dim() - 1:
        new = row_of(tracker, rows, range(rows.dim() - 1)).reshape(-1)
        tracker.join(row.reshape(-1), new)
        row = torch.maximum(row, new)
    tracker.freeze_beside_constants(ids, row, node)
    return torch.where(ids == ZERO, row, ids)


def chosen_axes(template: Any, index: Any, rank: int) -> list[int]:
    """The axes of ``x[index]`` along which computed tensors choose; [] where they choose channels."""
    templates, parts = (v if isinstance(v, tuple | list) else (v,) for v in (template, index))
    taken = sum(p.dim() if _is_mask(p) else p is not None and p is not Ellipsis for p in parts)
    found: list[int] = []
    axis = 0
    for word, part in zip(templates, parts, strict=True):
        if part is Ellipsis:
            axis += rank - taken
        elif part is not None:
            width = part.dim() if _is_mask(part) else 1
            found += range(axis, axis + width) if isinstance(part, Tensor) and computed(word) else ()
            axis += width
            if _is_mask(part) and axis == rank and whole_rows(part):
                found = [a for a in found if a != rank - 1]
    return [] if rank - 1 in found else found


def row_of(tracker: Tracker, ids: Tensor, axes: Any) -> Tensor:
    """One id for all rows along these axes (kept, of size 1); those found there are joined to it."""
    row = ids
    for axis in axes:
        row = first(row, axis)
    if row is not ids:
        tracker.join(ids, row.expand(ids.shape))
    return row


def first(ids: Tensor, axis: int) -> Tensor:
    """One id for all that lie along an axis, which may be empty: no token went to some expert."""
    if not ids.shape[axis]:
        return ids.new_full([1 if a == axis % ids.dim() else n for a, n in enumerate(ids.shape)], ZERO)
    if not ids.stride(axis) and ids.shape[axis] > 1:
        return ids.narrow(axis, 0, 1)
    best = compact(ids)[0].amax(axis, keepdim=True)
    return best.expand([1 if a == axis % ids.dim() else n for a, n in enumerate(ids.shape)])


def _one_axis(axis: Any, rank: int) -> list[int]:
    """An axis that is not the channels'."""
    return [axis % rank] if isinstance(axis, int) and axis % rank != rank - 1 else []


def whole_rows(mask: Tensor) -> bool:
    """Whether a mask is the same for all channels of each row, as it was made or as it is."""
    if not mask.dim() or mask.shape[-1] < 2 or not mask.stride(-1):
        return True
    return not mask.is_meta and bool((mask == mask[..., :1]).all())


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)


def _either(tracker: Tracker, node: fx.Node, a: Any, b: Any) -> None:
    """One of two at each place: channels of one coordinate; beside a number other than zero no rotation may touch them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        tracker.join(*torch.broadcast_tensors(a, b))
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Tensor):
            tracker.freeze(_beside(one, other), node, "it shares a column with a constant")


def _beside(ids: Tensor, other: Any) -> Tensor:
    """The ids that lie beside a constant; ZERO elsewhere."""
    if not isinstance(other, Tensor):
        return ids if other else torch.full_like(ids, ZERO)
    ids, other = torch.broadcast_tensors(ids, other)
    return torch.where(other == CONSTANT, ids, ZERO)
