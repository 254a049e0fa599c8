"""Which channels of which tensors are the same thing: coordinates that travel beside the values.

The program is replayed on its own inputs.  Beside every activation goes an integer tensor of the same shape that says,
for each element, which *coordinate* it is: "row 17 of this linear's weight", "column 3 of that embedding".  Operations
that only move data (reshape, permute, cat, expand, indexing, masked_scatter, ...) are run on these integers as they
are, so their effect is exact by construction and needs no rule of its own.  The rest falls into few classes:

    adds                    join the coordinates of their operands (union-find)
    factors without ids     split coordinates that meet different factors, so that only equals may be mixed
    token mixing            (attention weights @ V, means over tokens) keeps the coordinates of V, split by head
    linear                  reads its input's coordinates in its columns, writes new ones in its rows
    rms_norm                commutes with rotations: passes the coordinates on
    everything else         freezes its operands' coordinates, and says so

``spaces.py`` turns the result into channel spaces.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .kinds import kind, mutates
from .program import Program

ZERO, CONSTANT = -2, -1  # elements that hold zeros; elements that hold something no rotation may touch

MOVES = frozenset(
    "view reshape flatten unflatten ravel permute transpose t movedim contiguous clone detach expand expand_as repeat "
    "repeat_interleave tile cat stack hstack vstack split split_with_sizes chunk unbind tensor_split getitem narrow select "
    "index_select gather take_along_dim squeeze unsqueeze masked_scatter masked_select where roll flip pixel_shuffle "
    "pixel_unshuffle getattr:T getattr:mT broadcast_to masked_fill pad".split()
)
SAME = frozenset("to float double half bfloat16 type type_as dropout identity neg alias getattr:data".split())
FRESH_ZEROS = frozenset("zeros zeros_like new_zeros".split())
SHAPE_ONLY = frozenset("size dim numel ones_like empty_like full_like new_ones new_empty new_full rand_like randn_like empty ones full device getattr:device getattr:dtype getattr:shape".split())  # fmt: skip
SUMS = frozenset(("mean", "sum"))


@dataclass(frozen=True)
class Source:
    """Coordinates ``base`` to ``base + size``: an axis of a weight, a graph input's channels, or an operation's output.

    ``what`` is one of linear, conv, embedding, parameter, input, gain, op.  An axis of a weight has the same coordinates
    at every call; for gain (a norm's output times a gain) they are the gain's elements.
    """

    what: str
    node: fx.Node
    base: int
    size: int
    fqn: str = ""
    axis: int = 0


@dataclass(frozen=True)
class Reader:
    """A linear and the coordinate that each of its weight's columns reads; ``ids`` is None where nothing is known."""

    node: fx.Node
    fqn: str
    ids: Tensor | None


@dataclass(frozen=True)
class Gain:
    """A multiplication ``node`` = x * ``factor`` whose factor has one element per channel of x."""

    node: fx.Node
    x: fx.Node
    factor: fx.Node
    source: Source


@dataclass
class Coordinates:
    """Everything that the replay saw; ids are global."""

    total: int = 0
    sources: list[Source] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    norms: list[tuple[fx.Node, Tensor]] = field(default_factory=list)
    joins: list[Tensor] = field(default_factory=list)
    splits: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    frozen: list[tuple[Tensor, fx.Node, str]] = field(default_factory=list)
    shadows: dict[fx.Node, Any] = field(default_factory=dict)
    outputs: list[Tensor | None] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)


def coordinates(prog: Program) -> Coordinates:
    """Replay ``prog`` and return the coordinates of all it computes."""
    tracker = _Tracker(prog)
    with torch.no_grad():
        prog.replay(tracker.see)
    return tracker.found


class _Tracker:
    def __init__(self, prog: Program) -> None:
        self.prog = prog
        self.found = Coordinates()
        self.columns_of: dict[str, Tensor] = {}

    # -- plumbing --------------------------------------------------------------------------------------------------
    def see(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Called for every node with its real value."""
        if node.op == "output":
            flat = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
            self.found.outputs = [self.shadow(n) for n in flat]
            return
        self.found.shadows[node] = self.rule(node, result, args, kwargs)

    def shadow(self, node: Any) -> Any:
        return self.found.shadows.get(node) if isinstance(node, fx.Node) else None

    def new(self, what: str, node: fx.Node, size: int, fqn: str = "", axis: int = 0) -> Source:
        """New coordinates; those of a weight's axis are made once."""
        for known in self.found.sources if fqn else ():
            if (known.what, known.fqn, known.axis, known.size) == (what, fqn, axis, size):
                return known
        source = Source(what, node, self.found.total, size, fqn, axis)
        self.found.sources.append(source)
        self.found.total += size
        return source

    def freeze(self, ids: Tensor | None, node: fx.Node, reason: str) -> None:
        if ids is not None:
            known = ids[ids >= 0].unique()
            if known.numel():
                self.found.frozen.append((known, node, reason))

    def join(self, a: Tensor, b: Tensor) -> None:
        differ = (a != b) & (a >= 0) & (b >= 0)
        if differ.any():
            self.found.joins.append(torch.stack((a[differ], b[differ])).unique(dim=1))

    def split(self, ids: Tensor, cells: Tensor) -> None:
        """Coordinates may stay together only where they met the same cells, equally often."""
        ids, cells = torch.broadcast_tensors(ids, cells)
        keep = ids >= 0
        known, where = ids[keep].unique(return_inverse=True)
        mixed = (cells[keep].long() * 0x9E3779B1 + 0x7F4A7C15) * 0x27D4EB2F % (1 << 61)
        self.found.splits.append((known, torch.zeros(known.numel(), dtype=torch.long).index_add_(0, where, mixed.cpu())))

    # -- the rules -------------------------------------------------------------------------------------------------
    def rule(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        word = kind(node)
        if node.op == "get_attr":
            return None
        if node.op == "placeholder":
            tracked = isinstance(result, Tensor) and result.is_floating_point() and result.dim() >= 2
            return self.along_last(self.new("input", node, result.shape[-1]), result) if tracked else None
        handler = getattr(self, f"see_{word}", None)
        if handler is not None:
            return handler(node, result, args, kwargs)
        if word in FRESH_ZEROS:
            is_float = isinstance(result, Tensor) and result.is_floating_point() and result.dim() >= 2
            return torch.full(result.shape, ZERO) if is_float else None
        if word in SHAPE_ONLY:
            return None
        sources = [n for n in node.all_input_nodes if self.shadow(n) is not None]
        params = [n for n in node.all_input_nodes if n.op == "get_attr" and word in MOVES | SAME and self.is_channel_weight(n)]
        if not sources and not params:
            return None
        if word in SAME:
            return self.shadow(node.args[0]) if sources else self.parameter(params[0])
        if word in MOVES:
            return self.move(node, args, kwargs)
        return self.opaque(node, result, sources, word)

    def is_channel_weight(self, node: fx.Node) -> bool:
        weight = self.prog.weights[str(node.target)]
        return weight.is_floating_point() and weight.dim() >= 1 and weight.numel() > 1

    def along_last(self, source: Source, like: Tensor) -> Tensor:
        ids = torch.arange(source.base, source.base + source.size)
        return ids.expand(like.shape).contiguous()

    def parameter(self, node: fx.Node) -> Tensor:
        """A weight that is used as data (positions, class tokens): its last axis holds its channels."""
        weight = self.prog.weights[str(node.target)]
        source = self.new("parameter", node, weight.shape[-1], fqn=str(node.target), axis=weight.dim() - 1)
        return self.along_last(source, weight)

    def operand(self, node: Any) -> Tensor | None:
        """The ids of an operand of an element-wise operation, weights included."""
        if isinstance(node, fx.Node) and node.op == "get_attr" and self.is_channel_weight(node):
            return self.parameter(node)
        shadow = self.shadow(node)
        return shadow if isinstance(shadow, Tensor) else None

    def move(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operation itself on the ids; index and mask operands keep their values."""

        def swap(template: Any, value: Any) -> Any:
            if isinstance(template, fx.Node):
                ids = self.shadow(template)
                if ids is None and template.op == "get_attr" and isinstance(value, Tensor) and value.is_floating_point():
                    ids = self.parameter(template) if self.is_channel_weight(template) else None
                if ids is not None:
                    return ids
                if isinstance(value, Tensor) and value.is_floating_point():
                    return torch.full(value.shape, ZERO if not value.any() else CONSTANT)
                return value
            if isinstance(template, tuple | list):
                return type(template)(swap(t, v) for t, v in zip(template, value, strict=True))
            if isinstance(template, slice):
                return value
            return value

        new_args = [swap(t, v) for t, v in zip(node.args, args, strict=True)]
        new_kwargs = {k: swap(node.kwargs[k], v) for k, v in kwargs.items()}
        word = kind(node)
        if word == "masked_fill":
            new_args[2:] = [ZERO if args[2] == 0 else CONSTANT]
        elif word == "where":
            new_args = [ZERO if a == 0 and i else CONSTANT if isinstance(a, int | float) and i else a for i, a in enumerate(new_args)]
        elif word == "pad":
            value = kwargs.get("value", args[3] if len(args) > 3 else 0)
            new_args, new_kwargs = new_args[:2], {"value": CONSTANT if value else ZERO}
        if node.op == "call_method":
            return getattr(new_args[0], str(node.target))(*new_args[1:], **new_kwargs)
        return node.target(*new_args, **new_kwargs)  # type: ignore[operator]

    def opaque(self, node: fx.Node, result: Any, sources: list[fx.Node], word: str) -> Any:
        """Anything that mixes or bends channels: its operands stay as they are, its result is something new."""
        for source in sources:
            for ids in _leaves(self.shadow(source)):
                self.freeze(ids, node, f"{word} does not commute with a rotation")
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return None
        base = next((i for s in sources for i in _leaves(self.shadow(s)) if i.shape == result.shape), None)
        if base is not None:
            return self.renamed(node, base)
        return self.along_last(self.new("op", node, result.shape[-1]), result) if result.dim() else None

    def renamed(self, node: fx.Node, ids: Tensor) -> Tensor:
        """New coordinates, one for each old one."""
        known, where = ids.unique(return_inverse=True)
        return torch.where(ids >= 0, where + self.new("op", node, known.numel()).base, ids)

    # -- element-wise ----------------------------------------------------------------------------------------------
    def see_add(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not isinstance(result, Tensor):
            return None
        a, b = self.operand(node.args[0]), self.operand(node.args[1])
        if a is None and b is None:
            return None
        if a is None or b is None:
            ids, other = (a, args[1]) if b is None else (b, args[0])
            assert ids is not None
            if isinstance(other, int | float) and other == 0:
                return ids
            if isinstance(other, Tensor) and not other.any():
                return ids.expand(result.shape)
            self.freeze(ids, node, "something that is no channel of a weight is added")
            return self.renamed(node, ids.expand(result.shape))
        a, b = torch.broadcast_tensors(a, b)
        self.join(a, b)
        for one, other in ((a, b), (b, a)):
            self.freeze(torch.where(other == CONSTANT, one, ZERO), node, "a constant is added")
        joined = torch.where(a >= 0, a, torch.maximum(a, b)).contiguous()
        return self.write(node, joined) if mutates(node) else joined

    see_sub = see_add

    def write(self, node: fx.Node, ids: Tensor) -> Tensor:
        """An in-place operation: views of the written tensor see the new coordinates too."""
        target = self.shadow(node.args[0])
        if isinstance(target, Tensor) and target.shape == ids.shape:
            target.copy_(ids)
            return target
        return ids

    def see_mul(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not isinstance(result, Tensor) or len(node.args) < 2:
            return None
        a, b = self.shadow(node.args[0]), self.shadow(node.args[1])
        if a is None and b is None:
            return None
        if a is not None and b is not None:
            a, b = torch.broadcast_tensors(a, b)
            self.freeze(a, node, "it is multiplied by another activation")
            self.freeze(b, node, "it is multiplied by another activation")
            pairs = torch.stack((a, b), -1).reshape(-1, 2).unique(dim=0, return_inverse=True)[1].reshape(a.shape)
            return self.renamed(node, pairs)
        ids, factor = (a, args[1]) if b is None else (b, args[0])
        if not isinstance(factor, Tensor) or factor.numel() == 1:
            return ids.expand(result.shape)
        if kind(node) == "div" and b is not None:
            return self.opaque(node, result, [node.args[1]], "division")  # type: ignore[list-item]
        return self.factor(node, ids.expand(result.shape), factor, node.args[1] if b is None else node.args[0])

    see_div = see_mul

    def factor(self, node: fx.Node, ids: Tensor, factor: Tensor, origin: Any) -> Tensor:
        """x * t: coordinates that meet the same factors may still be mixed with each other."""
        cells = torch.arange(factor.numel()).reshape(factor.shape)
        if not _varies_together(ids, cells):
            return ids
        if factor.numel() == ids.shape[-1] == factor.shape[-1]:
            self.freeze(ids, node, "a gain per channel is multiplied in")
            names = weights_behind(origin)
            source = self.new("gain", node, factor.numel(), fqn=",".join(names) if names else "")
            x = next(n for n in node.all_input_nodes if n is not origin)
            self.found.gains.append(Gain(node, x, origin, source))
            return (cells + source.base).expand(ids.shape).contiguous()
        self.split(ids, cells)
        return ids

    # -- reductions, attention, norms ------------------------------------------------------------------------------
    def see_mean(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        ids = self.shadow(node.args[0])
        if ids is None:
            return None
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(dims, int | tuple | list):
            return self.opaque(node, result, [node.args[0]], kind(node))  # type: ignore[list-item]
        best = ids
        for dim in [dims] if isinstance(dims, int) else list(dims):
            best = best.amax(dim, keepdim=True)
        expanded = best.expand(ids.shape)
        channel = (ids != expanded) & (ids >= 0)
        if channel.any() and ids.shape[-1] > 1 and best.shape[-1] == 1:
            return self.opaque(node, result, [node.args[0]], kind(node))  # type: ignore[list-item]
        self.join(ids, expanded)
        return best.reshape(result.shape)

    see_sum = see_mean

    def see_matmul(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        a, b = self.shadow(node.args[0]), self.shadow(node.args[1])
        if a is None and b is not None and b.dim() >= 2:
            return self.mix_tokens(b, result, args[0].shape[:-2])
        self.freeze(a, node, "matmul with something that is no weight of a linear")
        self.freeze(b, node, "matmul with something that is no weight of a linear")
        if a is None or b is not None:
            return None
        return self.along_last(self.new("op", node, result.shape[-1]), result)

    def mix_tokens(self, ids: Tensor, result: Tensor, groups: torch.Size) -> Tensor:
        """Rows of V are averaged, head by head: channels stay channels, heads stay apart."""
        row = ids.amax(-2, keepdim=True)
        self.join(ids, row.expand(ids.shape))
        cells = torch.arange(max(1, groups.numel())).reshape(*groups, 1, 1) if groups else torch.zeros(1, 1, dtype=torch.long)
        row = row.expand(*result.shape[:-2], 1, result.shape[-1])
        if _varies_together(row, cells):
            self.split(row, cells)
        return row.expand(result.shape).contiguous()

    def see_scaled_dot_product_attention(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(("query", "key", "value"), node.args, strict=False)) | dict(node.kwargs)
        self.freeze(self.shadow(named["query"]), node, "attention scores")
        self.freeze(self.shadow(named["key"]), node, "attention scores")
        ids = self.shadow(named["value"])
        if ids is None:
            return None
        if kwargs.get("enable_gqa"):
            ids = ids.repeat_interleave(result.shape[-3] // ids.shape[-3], -3)
        return self.mix_tokens(ids, result, result.shape[:-2])

    def see_rms_norm(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        ids = self.shadow(node.args[0])
        if ids is None or node.op != "call_function" or len(args) != 2:
            return self.opaque(node, result, [node.args[0]], "rms_norm") if ids is not None else None  # type: ignore[list-item]
        row = self.columns(ids)
        self.found.norms.append((node, row))
        self.split(row, torch.zeros_like(row))
        return ids

    def see_layer_norm(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        ids = self.shadow(node.args[0])
        if ids is None:
            return None
        row = self.columns(ids)
        self.found.norms.append((node, row))
        self.freeze(row, node, MEAN)
        return self.renamed(node, ids)

    # -- weights ---------------------------------------------------------------------------------------------------
    def columns(self, ids: Tensor) -> Tensor:
        """One id for each position of the last axis; the others found there are joined to it."""
        rows = ids.reshape(-1, ids.shape[-1])
        best = rows.amax(0)
        self.join(rows, best.expand(rows.shape))
        if (rows == CONSTANT).any():
            mixed = (rows == CONSTANT).any(0)
            self.found.frozen.append((best[mixed & (best >= 0)], self.prog.graph._root, "it shares a column with a constant"))
        return best

    def see_linear(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
        weight, ids = named["weight"], self.shadow(named["input"])
        fqn = str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""
        row = self.columns(ids) if isinstance(ids, Tensor) else None
        if row is not None:
            self.split(row, torch.zeros_like(row))
            if fqn:
                self.join(row, self.columns_of.setdefault(fqn, row))
            if not fqn:
                self.freeze(row, node, "the weight of this linear is computed")
        self.found.readers.append(Reader(node, fqn, row))
        source = self.new("linear" if fqn else "op", node, result.shape[-1], fqn=fqn)
        known = torch.arange(source.base, source.base + source.size)
        self.split(known, torch.zeros_like(known))
        return self.along_last(source, result)

    def see_embedding(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(("input", "weight"), node.args, strict=False)) | dict(node.kwargs)
        weight = named["weight"]
        if not (isinstance(weight, fx.Node) and weight.op == "get_attr"):
            return None
        return self.along_last(self.new("embedding", node, result.shape[-1], fqn=str(weight.target), axis=1), result)

    def see_conv(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
        self.freeze(self.shadow(named["input"]), node, "a convolution reads it")
        weight = named["weight"]
        fqn = str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""
        axis = result.dim() - args[1].dim() + 1
        source = self.new("conv" if fqn else "op", node, result.shape[axis], fqn=fqn)
        ids = torch.arange(source.base, source.base + source.size)
        return ids.reshape(-1, *[1] * (result.dim() - axis - 1)).expand(result.shape).contiguous()

    def see_setitem(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        target, value = node.args[0], node.args[2]
        ids, new = self.shadow(target), self.shadow(value)
        if ids is None and new is None:
            return None
        if ids is None:
            ids = self.found.shadows[target] = torch.full(args[0].shape, ZERO if not args[0].any() else CONSTANT)  # type: ignore[index]
        if new is None:
            new = ZERO if not torch.as_tensor(args[2]).any() else CONSTANT
        operator.setitem(ids, args[1], new)
        return None


MEAN = "layer_norm subtracts its mean"


def weights_behind(node: Any) -> tuple[str, ...]:
    """Names of the weights that ``node`` is computed from, or () if anything else goes in."""
    names: set[str] = set()
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if not isinstance(current, fx.Node) or current.op == "placeholder":
            return ()
        if current.op == "get_attr":
            names.add(str(current.target))
        seen.add(current)
        todo.extend(n for n in current.all_input_nodes if n not in seen)
    return tuple(sorted(names))


def _leaves(shadow: Any) -> list[Tensor]:
    if isinstance(shadow, Tensor):
        return [shadow]
    return [i for s in shadow for i in _leaves(s)] if isinstance(shadow, tuple | list) else []


def _varies_together(ids: Tensor, cells: Tensor) -> bool:
    """Whether ids differ along an axis along which the cells differ too."""
    for axis in range(1, cells.dim() + 1):
        if cells.shape[-axis] > 1 and axis <= ids.dim() and ids.shape[-axis] > 1:
            first = ids.select(-axis, 0).unsqueeze(-axis)
            if bool(((ids != first) & (ids >= 0) & (first >= 0)).any()):
                return True
    return False
