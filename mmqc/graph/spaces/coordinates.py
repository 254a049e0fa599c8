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

The rules themselves are in coordinate_rules.py; ``spaces.py`` turns the result into channel spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.linear import Contraction, contraction
from mmqc.graph.memory import written
from mmqc.graph.program import LOOSE, READ, Program, method_name

ZERO, CONSTANT = -2, -1  # elements that hold zeros; elements that hold something no rotation may touch

# fmt: off
MOVES = frozenset((
    "view", "reshape", "flatten", "unflatten", "ravel", "permute", "transpose", "t", "movedim", "contiguous", "clone",
    "detach", "expand", "expand_as", "repeat", "repeat_interleave", "tile", "cat", "stack", "hstack", "vstack", "split",
    "split_with_sizes", "chunk", "unbind", "tensor_split", "getitem", "narrow", "select", "index_select", "gather",
    "take_along_dim", "squeeze", "unsqueeze", "masked_scatter", "masked_select", "where", "roll", "flip", "pixel_shuffle",
    "pixel_unshuffle", "getattr:T", "getattr:mT", "broadcast_to", "masked_fill", "pad", "index_copy", "scatter",
    "index_put", "slice_scatter", "select_scatter", "copy",
))
SAME = frozenset((
    "to", "float", "double", "half", "bfloat16", "type", "type_as", "dropout", "identity", "neg", "alias", "getattr:data",
))
COPIES = frozenset(("contiguous", "clone"))
FRESH_ZEROS = frozenset(("zeros", "zeros_like", "new_zeros"))
SHAPE_ONLY = frozenset((
    "size", "dim", "numel", "ones_like", "empty_like", "full_like", "new_ones", "new_empty", "new_full", "rand_like",
    "randn_like", "empty", "ones", "full", "device", "getattr:device", "getattr:dtype", "getattr:shape",
))
# fmt: on
KEEPS_ZERO = frozenset(("relu", "relu6", "gelu", "silu", "mish", "tanh", "hardswish", "leaky_relu", "elu", "abs", "square"))
SPREAD = 16  # to mark as many numbers costs less than to sort one
MANY = 1 << 16  # numbers from which on it pays to look for rows that are alike
MEAN = "layer_norm subtracts its mean"


@dataclass(frozen=True)
class Source:
    """Coordinates ``base`` to ``base + size``: an axis of a weight, a graph input's channels, or an operation's output.

    ``what`` is one of linear, conv, embedding, parameter, input, gain, op.  An axis of a weight has the same
    coordinates at every call; for gain (a norm's output times a gain) they are the gain's elements.
    """

    what: str
    node: fx.Node
    base: int
    size: int
    fqn: str = ""
    axis: int = 0


@dataclass(frozen=True)
class Reader:
    """A contraction and the coordinate that each index of its weight's ``axis`` reads; None where nothing is known."""

    node: fx.Node
    fqn: str
    ids: Tensor | None
    axis: int = 1


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
    meetings: list[tuple[fx.Node, Tensor, Tensor]] = field(default_factory=list)  # where channels of several rows meet: rows.py
    contractions: dict[fx.Node, Contraction] = field(default_factory=dict)
    idle: set[fx.Node] = field(default_factory=set)  # contractions that saw no row


class Tracker:
    """Follows a replay node by node; kind ``k`` goes to the method ``_see_k``, if there is one."""

    def __init__(self, prog: Program, through_norms: bool = True) -> None:
        self.prog, self.through_norms = prog, through_norms
        self.found = Coordinates()
        self.columns_of: dict[tuple[str, int], Tensor] = {}
        self.made: dict[tuple[str, str, int, int], Source] = {}
        self.written = written(prog)
        self.constant: set[fx.Node] = set()  # no input of the program goes into them
        self.found.contractions = {n: c for n in prog.graph.nodes if (c := contraction(prog, n)) is not None}
        self.on_the_way = {n for c in self.found.contractions.values() for n in c.chain}

    # -- plumbing --------------------------------------------------------------------------------------------------
    def see(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Called for every node with its real value."""
        if node.op == "output":
            flat = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
            self.found.outputs = [self.shadow(n) for n in flat]
            return
        if node.op != "placeholder" and self.constant.issuperset(node.all_input_nodes):
            self.constant.add(node)
        ids = self.rule(node, result, args, kwargs)
        if node in self.written:
            if isinstance(ids, Tensor) and isinstance(result, Tensor) and ids.shape == result.shape:
                ids = laid_out_like(ids, result, args, node.meta.get("view"))
        elif isinstance(ids, Tensor):
            ids = thin(apart(ids, [self.shadow(n) for n in node.all_input_nodes if n in self.written]))
        self.found.shadows[node] = ids

    def shadow(self, node: Any) -> Any:
        """The ids of a node's value, if it is tracked."""
        return self.found.shadows.get(node) if isinstance(node, fx.Node) else None

    def weights_of(self, node: Any) -> tuple[str, ...]:
        """``weights_behind``, which would look at all that comes before for a node that does not."""
        return weights_behind(node) if node in self.constant else ()

    def new(self, what: str, node: fx.Node, size: int, fqn: str = "", axis: int = 0) -> Source:
        """New coordinates; those of a weight's axis are made once."""
        key = (what, fqn, axis, size)
        if fqn and key in self.made:
            return self.made[key]
        source = Source(what, node, self.found.total, size, fqn, axis)
        self.made[key] = source
        self.found.sources.append(source)
        self.found.total += size
        return source

    def freeze(self, ids: Tensor | None, node: fx.Node, reason: str) -> None:
        """No rotation may touch these coordinates."""
        if ids is not None:
            ids = unlike(ids)[0].reshape(-1)
            known = distinct(ids[ids >= 0] if (ids < 0).any() else ids.clone())  # some are written into later
            if known.numel():
                self.found.frozen.append((known, node, reason))

    def freeze_beside_constants(self, ids: Tensor, best: Tensor, node: fx.Node) -> None:
        """Where values with coordinates are mixed with constants, no rotation may touch them."""
        if (compact(ids)[0] == CONSTANT).any():
            mixed = ((ids == CONSTANT) & (best.expand(ids.shape) >= 0)).reshape(ids.shape)
            self.freeze(torch.where(mixed, best.expand(ids.shape), ZERO), node, "it shares a column with a constant")

    def join(self, a: Tensor, b: Tensor) -> None:
        """Elements at the same place are the same coordinate."""
        a, b = unlike(a, b)
        differ = (a != b) & (a >= 0) & (b >= 0)
        if differ.any():
            pairs = distinct(a[differ].long() * self.found.total + b[differ])
            self.found.joins.append(torch.stack((pairs // self.found.total, pairs % self.found.total)))

    def split(self, ids: Tensor, cells: Tensor) -> None:
        """Coordinates may stay together only where they met the same cells, equally often.

        Along an axis along which ids do not vary (tokens), every coordinate meets every slice of the cells, whose numbers
        are unlike each other's: those who meet the same in one slice do in all.
        """
        ids, cells = torch.broadcast_tensors(ids, cells)
        for axis in range(ids.dim()):
            if ids.stride(axis) == 0 and ids.shape[axis] > 1:
                ids, cells = ids.narrow(axis, 0, 1), cells.narrow(axis, 0, 1)
        keep = ids >= 0
        if keep.all():  # nearly always
            ids, cells = ids.reshape(-1).clone(), cells.reshape(-1)  # some are written into later
        else:
            ids, cells = ids[keep], cells[keep]
        self.found.splits.append((ids, (cells.long() * 0x9E3779B1 + 0x7F4A7C15) * 0x27D4EB2F % (1 << 61)))

    # -- the rules -------------------------------------------------------------------------------------------------
    def rule(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The ids of a node's result."""
        word = "contraction" if node in self.found.contractions else READ if READ in node.meta else kind(node)
        if node.op == "get_attr" or node in self.on_the_way:
            return None
        if node.op == "placeholder":
            tracked = isinstance(result, Tensor) and result.is_floating_point() and result.dim() >= 2
            return self.along_last(self.new("input", node, result.shape[-1]), result) if tracked else None
        handler = getattr(self, f"_see_{word}", None)
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
        if word in SAME and isinstance(result, Tensor) and result.is_floating_point():
            return self.shadow(node.args[0]) if sources else self.parameter(params[0])
        if self.is_move(word, args, kwargs):
            return self.moved(node, word, args, kwargs)
        return self.opaque(node, result, sources, word)

    def moved(self, node: fx.Node, word: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The ids of a move's result."""
        del word
        return self.move(node, args, kwargs, self.ids_for)

    def is_channel_weight(self, node: fx.Node) -> bool:
        """Whether a weight, used as data, has channels."""
        weight = self.prog.weights[str(node.target)]
        loose = str(node.target).startswith(LOOSE)
        return not loose and weight.is_floating_point() and weight.dim() >= 1 and weight.numel() > 1

    def along_last(self, source: Source, like: Tensor) -> Tensor:
        """Ids of a source along the last axis of a tensor."""
        ids = torch.arange(source.base, source.base + source.size)
        return ids.expand(like.shape)

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

    def is_move(self, word: str, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Whether an operation does nothing but put elements elsewhere, constants beside them."""
        as_bits = word == "view" and any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values()))
        return word in MOVES and not as_bits and not (word == "pad" and _pad_mode(args, kwargs) != "constant")

    def move(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any], stands_for: Callable[[Any, Any], Any]) -> Any:
        """Run the operation itself on what stands for its operands; index and mask operands keep their values."""
        new_args = [stands_for(t, v) for t, v in zip(node.args, args, strict=True)]
        new_kwargs = {k: stands_for(node.kwargs[k], v) for k, v in kwargs.items()}
        word = kind(node)
        if word in COPIES and node not in self.written:
            return new_args[0]
        if word == "masked_fill":
            new_args[2:] = [_filler(kwargs.get("value", args[2] if len(args) > 2 else 0))]
            new_kwargs.pop("value", None)
        elif word == "where":
            new_args[1:] = [_filler(a) if isinstance(a, int | float) else a for a in new_args[1:]]
        elif word == "scatter":
            new_args[3:] = [_filler(a) if isinstance(a, int | float) else a for a in new_args[3:]]
            new_kwargs |= {k: _filler(v) for k, v in new_kwargs.items() if k == "value"}
        elif word == "pad":
            value = kwargs.get("value", args[3] if len(args) > 3 else 0)
            new_args, new_kwargs = new_args[:2], {"value": _filler(value)}
        if word == "cat" and not new_kwargs.keys() - {"dim", "axis"}:
            return _cat(new_args[0], new_kwargs.get("dim", new_kwargs.get("axis", new_args[1] if len(new_args) > 1 else 0)))
        if node.op == "call_method":
            return getattr(new_args[0], method_name(node, args))(*new_args[1:], **new_kwargs)
        return node.target(*new_args, **new_kwargs)  # type: ignore[operator]

    def ids_for(self, template: Any, value: Any) -> Any:
        """What stands for an operand of a move: its ids, constants for untracked floats, else the value itself."""
        if isinstance(template, fx.Node):
            ids = self.operand(template) if template.op == "get_attr" else self.shadow(template)
            if ids is not None:
                return ids
            if isinstance(value, Tensor) and value.is_floating_point():
                return torch.full(value.shape, _filler(value))
            return value.cpu() if isinstance(value, Tensor) and not value.is_meta else value  # ids live on the CPU
        if isinstance(template, tuple | list):
            return type(template)(self.ids_for(t, v) for t, v in zip(template, value, strict=True))
        return value

    def opaque(self, node: fx.Node, result: Any, sources: list[fx.Node], word: str) -> Any:
        """Anything that mixes or bends channels, or looks at them: its operands stay as they are, its result is something new."""
        for source in sources:
            for ids in leaves(self.shadow(source)):
                self.freeze(ids, node, node.meta.get(READ, f"{word} does not commute with a rotation"))
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return None
        base = next((i for s in sources for i in leaves(self.shadow(s)) if i.shape == result.shape), None)
        if base is not None:
            few, keeps_zero = compact(base)[0], word in KEEPS_ZERO and len(sources) == 1
            few = few if keeps_zero else torch.where(few == ZERO, CONSTANT, few)
            return self.renamed(node, few).expand(base.shape)
        return self.along_last(self.new("op", node, result.shape[-1]), result) if result.dim() else None

    def renamed(self, node: fx.Node, ids: Tensor) -> Tensor:
        """New coordinates, one for each old one."""
        few = compact(ids)[0]
        if _ascends(few.reshape(-1)):
            where, count = torch.arange(few.numel()).reshape(few.shape), few.numel()
        else:
            where, count = numbered(few)
        return torch.where(few >= 0, where + self.new("op", node, count).base, few).expand(ids.shape)


def _filler(value: Tensor | float | None) -> int:
    """The id that stands for a constant."""
    return ZERO if value is None or is_zero(value) else CONSTANT


def is_zero(value: Tensor | float) -> bool:
    """Whether there is nothing but zeros; a tensor without values may hold anything."""
    if not isinstance(value, Tensor):
        return not value
    return not value.is_meta and not bool(value.any())


def _pad_mode(args: list[Any], kwargs: dict[str, Any]) -> str:
    return kwargs.get("mode", args[2] if len(args) > 2 else "constant")


def compact(*tensors: Tensor) -> list[Tensor]:
    """The tensors broadcast against each other, then without the axes along which none of them varies."""
    full = tensors if len(tensors) == 1 else torch.broadcast_tensors(*tensors)
    strides = [t.stride() for t in full]
    for axis, size in enumerate(full[0].shape):
        if size > 1 and not any(s[axis] for s in strides):
            full = [t.narrow(axis, 0, 1) for t in full]
    return list(full)


def unlike(*tensors: Tensor) -> list[Tensor]:
    """As ``compact``, and of rows that are alike in all tensors most are left out, [rows, K], for who asks what meets at all.

    Among the tokens of text and images there are two kinds of rows.  Each round takes one and all that are like it, for as long
    as these are an eighth of what is left.
    """
    full = compact(*tensors)
    if full[0].dim() < 2 or full[0].numel() < MANY:
        return full
    left = [t.reshape(-1, t.shape[-1]) for t in full]
    found: list[list[Tensor]] = []
    while (count := len(left[0])) > 1:
        found.append([t[:1] for t in left])
        others = torch.stack([(t != t[:1]).any(1) for t in left]).any(0)
        left = [t[others] for t in left]
        if 8 * len(left[0]) > 7 * count:
            break
    return [torch.cat(parts) for parts in zip(*found, left, strict=True)]


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """``torch.cat``, expanded along the axes along which no part varies, and along ``dim`` if all are alike there."""
    parts = [p for p in parts if p.numel() or p.dim() > 1] or parts  # an empty cache is a tensor of no numbers and one axis
    shape, dim = list(parts[0].shape), dim % max(1, parts[0].dim())
    for axis in (a for a in range(len(shape)) if a != dim and shape[a]):
        if all(p.stride(axis) == 0 for p in parts):
            parts = [p.narrow(axis, 0, 1) for p in parts]
    if all(p.shape[dim] == 1 or (p.numel() and not p.stride(dim)) for p in parts):
        firsts = [p.narrow(dim, 0, 1) for p in parts]
        if all(torch.equal(first, firsts[0]) for first in firsts[1:]):
            whole, shape[dim] = firsts[0].clone(), sum(p.shape[dim] for p in parts)
            return whole.expand(shape)
    whole = torch.cat(tuple(parts), dim)
    return whole.expand([n if a == dim else shape[a] for a, n in enumerate(whole.shape)])


def _ascends(ids: Tensor) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def distinct(ids: Tensor) -> Tensor:
    """Each id once, in order; most of the time they come so, and where many are few numbers there is nothing to sort."""
    if _ascends(ids):
        return ids
    low, high = (int(end) for end in torch.aminmax(ids))
    if high - low >= SPREAD * ids.numel() or ids.dtype == torch.bool:  # of truths there are two
        return ids.unique()
    there = torch.zeros(high - low + 1, dtype=torch.bool)
    there[ids - low] = True
    return there.nonzero()[:, 0] + low


def numbered(ids: Tensor) -> tuple[Tensor, int]:
    """The place of every id among the distinct ones, and how many these are."""
    known = distinct(unlike(ids)[0].reshape(-1))  # rows are mostly alike
    low, count = int(known[0]), known.numel()
    width = int(known[-1]) - low + 1
    if width >= SPREAD * ids.numel():
        return torch.searchsorted(known, ids), count
    table = torch.empty(width, dtype=torch.long)
    table[known - low] = torch.arange(count)
    return table[ids - low], count


def thin(ids: Tensor) -> Tensor:
    """The same ids, expanded along every axis but the last along which they do not vary: tokens are mostly alike."""
    for axis in range(ids.dim() - 1):
        if ids.shape[axis] > 1 and ids.stride(axis):
            first = ids.narrow(axis, 0, 1)
            if torch.equal(*compact(ids, first.expand_as(ids))):
                ids = first.expand_as(ids)
    return ids


def apart(ids: Tensor, written: Sequence[Any]) -> Tensor:
    """Ids of a value that nobody writes into, in no memory of those that somebody writes into."""
    memory = ids.untyped_storage()._cdata
    shares = any(memory == i.untyped_storage()._cdata for each in written for i in leaves(each))
    return compact(ids)[0].clone().expand(ids.shape) if shares else ids


def laid_out_like(ids: Tensor, result: Tensor, args: list[Any], view: bool | None) -> Tensor:
    """Ids with the strides of the value, and memory of their own where the value has its own."""
    if view is None:
        memory = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
        view = result.untyped_storage()._cdata in memory
    if view:
        return ids
    fresh = torch.empty_strided(result.shape, result.stride(), dtype=torch.long)
    return fresh.copy_(ids)


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


def leaves(shadow: Any) -> list[Tensor]:
    """The tensors of what stands for a result: a tensor, a tuple of them, nothing."""
    if isinstance(shadow, Tensor):
        return [shadow]
    return [i for s in shadow for i in leaves(s)] if isinstance(shadow, tuple | list) else []


def varies_together(ids: Tensor, cells: Tensor) -> bool:
    """Whether ids differ along an axis along which the cells differ too."""
    ids = compact(ids)[0]
    for axis in range(1, cells.dim() + 1):
        if cells.shape[-axis] > 1 and axis <= ids.dim() and ids.shape[-axis] > 1:
            one = ids.amax(-axis, keepdim=True)  # any that is none of a constant
            if bool(((ids != one) & (ids >= 0)).any()):
                return True
    return False
