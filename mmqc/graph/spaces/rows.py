"""Which row of values every element belongs to: a rotation mixes the channels of one row, so they must have come all the same way.

Coordinates (coordinates.py) say which channel an element is.  They do not say that all channels were treated alike:

    cat(h[..., :8], 2 * h[..., 8:])         cat(h[:, :-1, :8], h[:, 1:, 8:])         h[..., 8:].masked_fill_(mask, 0)

leave every element on its coordinate, and none of them commutes with a rotation of all channels.  So a second tensor of
integers goes beside the coordinates.  Sources number their rows, moves move the numbers, any other operation gives each row
a new number made of those that went in.  Where channels meet again (in a linear, in a norm), those of one space must have
one number; otherwise the space is pinned.

Numbers hardly ever vary along the channels, so that axis costs nothing: it is expanded, and never looked at.

Where the channels that one operation writes turn out to be several copies of a space (halves of a row that are added to each
other), its rows are as many as copies.  That is known at the end only; the replay is then done again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind, mutates
from mmqc.graph.spaces.coordinates import MOVES, SAME, apart, compact, laid_out_like, leaves

if TYPE_CHECKING:
    from mmqc.graph.spaces.coordinates import Tracker

ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0x27D4EB2F165667C5)
DATA = frozenset(("add", "sub", *SAME))
POOLS = frozenset(("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "interpolate", "grid_sample"))
APART = "a part of its channels came here by another way (scaled, moved or masked by itself)"


class Rows:
    """Row numbers beside the coordinates that ``tracker`` finds; ``see`` follows the same replay.

    ``copies`` has, for each coordinate, the number of its copy among those that one operation writes.
    """

    def __init__(self, tracker: Tracker, copies: Tensor | None = None) -> None:
        self.tracker, self.copies = tracker, copies
        self.of: dict[fx.Node, Any] = {}
        self.count = 0

    def see(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any], ids: Any) -> None:
        """Called for every node after the tracker has found its coordinates."""
        self.count += 1
        if kind(node) == "setitem" and isinstance(self.tracker.shadow(node.args[0]), Tensor):
            self.assign(node, args)
        if not leaves(ids):
            return
        rows = self.rule(node, result, args, kwargs, ids)
        if isinstance(rows, Tensor):
            if mutates(node):
                rows = self.written(node, rows)
            if node in self.tracker.written:
                rows = laid_out_like(rows, result, args, node.meta.get("view")) if isinstance(result, Tensor) else rows
            else:
                rows = _thin(apart(rows, [self.of.get(n) for n in node.all_input_nodes if n in self.tracker.written]))
        self.of[node] = rows

    def rule(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any], ids: Any) -> Any:
        """The numbers of a node's result."""
        word = "contraction" if node in self.tracker.found.contractions else kind(node)
        known = [r for n in node.all_input_nodes for r in leaves(self.rows_of(n, word))]
        if word in SAME and word != "neg" and known:
            return known[0]
        if self.tracker.is_move(word, args, kwargs):
            return self.tracker.move(node, args, kwargs, self.stands_for)
        if not isinstance(result, Tensor):
            return None
        gains = self.tracker.found.gains
        made = word in ("contraction", "conv", "linear", "embedding") or (gains and gains[-1].node is node)
        if made or not known:
            return self.by_copy(self.fresh(result.shape, self.channel(node, word, args, kwargs, result)), ids)
        if word in ("mean", "sum") and len(known) == 1:
            return self.reduced(known[0], result, args, kwargs)
        if word in POOLS:
            return self.mixed(known[0].sum(tuple(range(2, known[0].dim())), keepdim=True), self.fresh(result.shape, 1))
        if word in ("matmul", "scaled_dot_product_attention"):
            return self.attended(node, result)
        if word == "index_add" and len(known) == 2:
            few = compact(*known) if known[0].shape == known[1].shape else known
            return self.mixed(few[0].index_add(args[1], args[2].cpu(), self.mixed(few[1]))).expand(result.shape)
        if any(r.shape == result.shape for r in known) and _broadcast(known, result.shape):
            return self.by_copy(self.mixed(*known).expand(result.shape), ids)
        return self.by_copy(self.fresh(result.shape, -1), ids)

    def meet(self, node: fx.Node, x: Any, ids: Tensor, channel: int = -1) -> None:
        """The channels of ``x`` meet in ``node``; ``ids`` [K] are their coordinates."""
        rows = self.of.get(x) if isinstance(x, fx.Node) else None
        if isinstance(rows, Tensor) and rows.numel():
            rows = rows.movedim(channel, -1)
            if rows.stride(-1) and rows.shape[-1] > 1:
                flat = rows.reshape(-1, rows.shape[-1])
                mark = (flat ^ (flat >> 31)) * torch.arange(1, 2 * len(flat), 2)[:, None] * ODD[0]
                self.tracker.found.meetings.append((node, ids, (mark ^ (mark >> 29)).sum(0)))

    # -- numbers ---------------------------------------------------------------------------------------------------
    def fresh(self, shape: torch.Size, channel: int) -> Tensor:
        """A number for every place, the same along the channels."""
        if not shape:
            return torch.tensor(self.count)
        few = [1 if axis == channel % len(shape) else n for axis, n in enumerate(shape)]
        places = torch.arange(torch.Size(few).numel()).reshape(few)
        return self.mixed(places).expand(shape)

    def by_copy(self, rows: Tensor, ids: Any) -> Tensor:
        """The numbers, told apart by the copies that the coordinates are of."""
        if self.copies is None or not isinstance(ids, Tensor) or ids.shape != rows.shape:
            return rows
        few = compact(ids)[0]
        copy = torch.where(few >= 0, self.copies[few.clamp(min=0)], 0)
        return self.mixed(rows, copy.expand(rows.shape)) if copy.any() else rows

    def mixed(self, *rows: Tensor) -> Tensor:
        """New numbers, made of these and of the node."""
        few = compact(*rows)
        shape = rows[0].shape if len(rows) == 1 else torch.broadcast_shapes(*(r.shape for r in rows))
        total = torch.mul(few[0], ODD[0]).add_(self.count).expand(torch.broadcast_shapes(*(r.shape for r in few))).contiguous()
        for numbers in few[1:]:
            total.bitwise_xor_(total >> 29).mul_(ODD[1]).add_(numbers)
        return total.bitwise_xor_(total >> 29).mul_(ODD[1]).expand(shape)

    def reduced(self, rows: Tensor, result: Tensor, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        """A mean or sum over tokens: one number for all that went in."""
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(dims, int | tuple | list):
            return self.fresh(result.shape, -1)
        dims = (dims,) if isinstance(dims, int) else tuple(dims)
        return self.mixed(rows.sum(dims, keepdim=True)).reshape(result.shape)

    def attended(self, node: fx.Node, result: Tensor) -> Tensor:
        """Tokens mixed by weights that all channels of a head share (heads have coordinates of their own): the query's place."""
        word = "value" if kind(node) == "scaled_dot_product_attention" else "other"
        value = node.kwargs.get(word, node.args[2 if word == "value" else 1] if len(node.args) > 1 else None)
        rows = self.of.get(value) if isinstance(value, fx.Node) else None
        if not isinstance(rows, Tensor) or rows.dim() < 2 or not result.dim() > 1:
            return self.fresh(result.shape, -1)
        places = torch.arange(result.shape[-2])[:, None]
        few = compact(rows)[0]
        few = few.expand(*few.shape[:-2], rows.shape[-2], few.shape[-1]).sum(-2, keepdim=True)
        if few.dim() > 2 and few.shape[-3] > 1 and few.shape[-3] != result.shape[-3]:  # grouped queries
            few = few.repeat_interleave(result.shape[-3] // few.shape[-3], -3)
        return self.mixed(few, places).expand(result.shape)

    def channel(self, node: fx.Node, word: str, args: list[Any], kwargs: dict[str, Any], result: Tensor) -> int:
        """The axis along which a source's channels lie."""
        if word == "contraction":
            return self.tracker.found.contractions[node].channel
        if word != "conv":
            return -1
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        return result.dim() - weight.dim() + 1 if isinstance(weight, Tensor) else -1

    # -- operands --------------------------------------------------------------------------------------------------
    def rows_of(self, node: fx.Node, word: str) -> Any:
        """The numbers of an operand; a weight has some where it is data (a table of positions that is added)."""
        data = node.op == "get_attr" and (word in DATA or word in MOVES) and self.tracker.is_channel_weight(node)
        if data and node not in self.of:
            ids = self.tracker.parameter(node)
            self.count += 1
            self.of[node] = self.by_copy(self.fresh(ids.shape, -1), ids)
        return self.of.get(node)

    def stands_for(self, template: Any, value: Any) -> Any:
        """What stands for an operand of a move: its numbers, 0 for untracked floats, else the value itself."""
        if isinstance(template, fx.Node):
            rows = self.rows_of(template, "cat")
            if rows is not None:
                return rows
            if isinstance(value, Tensor) and value.is_floating_point():
                return torch.zeros(value.shape, dtype=torch.long)
            return value.cpu() if isinstance(value, Tensor) and not value.is_meta else value
        if isinstance(template, tuple | list):
            return type(template)(self.stands_for(t, v) for t, v in zip(template, value, strict=True))
        return value

    def written(self, node: fx.Node, rows: Tensor) -> Tensor:
        """An in-place operation: views of the written tensor see the new numbers too."""
        target = self.of.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        apart = isinstance(target, Tensor) and 0 not in target.stride()  # else its numbers are its own, and no view of others
        if isinstance(target, Tensor) and target.shape == rows.shape and apart:
            return target.copy_(rows)
        return rows

    def assign(self, node: fx.Node, args: list[Any]) -> None:
        """``target[index] = value``."""
        target, value = (self.of.get(n) if isinstance(n, fx.Node) else None for n in (node.args[0], node.args[2]))
        if target is None:
            target = self.of[node.args[0]] = torch.zeros(args[0].shape, dtype=torch.long)  # type: ignore[index]
        target[self.stands_for(node.args[1], args[1])] = self.count if value is None else value


def _broadcast(known: list[Tensor], shape: torch.Size) -> bool:
    """Whether all of them can be expanded to ``shape``."""
    fits = lambda r: r.dim() <= len(shape) and all(n in (1, m) for n, m in zip(reversed(r.shape), reversed(shape), strict=False))  # noqa: E731
    return all(r.shape == shape or fits(r) for r in known)


def _thin(rows: Tensor) -> Tensor:
    """The same numbers, expanded along the last axis if they do not vary there."""
    if not rows.dim() or rows.shape[-1] < 2 or not rows.stride(-1):
        return rows
    first = rows.narrow(-1, 0, 1).expand_as(rows)
    return first if torch.equal(*compact(rows, first)) else rows
