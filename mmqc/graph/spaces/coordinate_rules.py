"""The rules by which coordinates pass through operations: see coordinates.py for the idea."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind, mutates
from mmqc.graph.linear import operands
from mmqc.graph.program import Program
from mmqc.graph.semantic import layer_norm
from mmqc.graph.spaces.coordinates import (
    CONSTANT,
    MEAN,
    ZERO,
    Coordinates,
    Gain,
    Reader,
    Tracker,
    compact,
    is_zero,
    varies_together,
)
from mmqc.graph.spaces.rows import Rows
from mmqc.graph.spaces.selections import any_row, chosen_axes, first, join_choices, join_written, row_of


def coordinates(prog: Program, through_norms: bool = True, copies: Tensor | None = None, rows: bool = True) -> Coordinates:
    """Replay ``prog`` and return the coordinates of all it computes.

    ``Spaces.of`` explains ``through_norms``, ``Rows`` its ``copies``; without ``rows`` there are no ``meetings``.
    """
    tracker = Rules(prog, through_norms, copies, rows)
    with torch.no_grad():
        prog.replay(tracker.see, values=not prog.sketches)
    return tracker.found


class Rules(Tracker):
    """One method per kind of operation that neither moves data nor is opaque."""

    def __init__(self, prog: Program, through_norms: bool = True, copies: Tensor | None = None, rows: bool = True) -> None:
        super().__init__(prog, through_norms)
        self.rows = Rows(self, copies) if rows else None

    def see(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Coordinates first, then the rows that they come in."""
        super().see(node, result, args, kwargs)
        if self.rows is not None:
            self.rows.see(node, result, args, kwargs, self.shadow(node))

    def meet(self, node: fx.Node, x: Any, ids: Tensor, channel: int = -1) -> None:
        """The channels of ``x`` meet in ``node``."""
        if self.rows is not None:
            self.rows.meet(node, x, ids, channel)

    def moved(self, node: fx.Node, word: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """And those of what an index or a mask might have put there instead."""
        join_choices(self, node, word, args, kwargs)
        return join_written(self, node, word, args, super().moved(node, word, args, kwargs))

    # -- element-wise ----------------------------------------------------------------------------------------------
    def _see_add(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
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
            if isinstance(other, Tensor) and is_zero(other):
                return ids.expand(result.shape)
            if _is_vector(result) and self.weights_of(node):  # 1 + w: a gain
                return None
            self.freeze(ids, node, "something that is no channel of a weight is added")
            return self.renamed(node, ids.expand(result.shape))
        a, b = torch.broadcast_tensors(a, b)
        self.join(a, b)
        for one, other in (compact(a, b), compact(b, a)):
            constant = other == CONSTANT
            if constant.any():
                self.freeze(torch.where(constant, one, ZERO), node, "a constant is added")
        # One name for what is the same now, that of fewer numbers: with images' rows among the text's, tokens differ in theirs.
        few, other = compact(*sorted((a, b), key=lambda ids: compact(ids)[0].numel()))
        known = few >= 0
        joined = (few if known.all() else torch.where(known, few, torch.maximum(few, other))).expand(a.shape)
        return self.write(node, joined) if mutates(node) else joined

    _see_sub = _see_add

    def write(self, node: fx.Node, ids: Tensor) -> Tensor:
        """An in-place operation: views of the written tensor see the new coordinates too."""
        target = self.shadow(node.args[0])
        if isinstance(target, Tensor) and target.shape == ids.shape:
            target.copy_(ids)
            return target
        return ids

    def _see_mul(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not isinstance(result, Tensor) or len(node.args) < 2:
            return None
        a, b = self.shadow(node.args[0]), self.shadow(node.args[1])
        if a is None and b is None:
            return None
        if a is not None and b is not None:
            if _is_vector(args[1]) and self.weights_of(node.args[1]):  # a weight behind a cast: a gain
                b = self.freeze(b, node, "it is a gain")
            elif _is_vector(args[0]) and self.weights_of(node.args[0]):
                a = self.freeze(a, node, "it is a gain")
        if a is not None and b is not None:
            return self.product(node, a, b)
        ids, factor = (a, args[1]) if b is None else (b, args[0])
        assert ids is not None
        if not isinstance(factor, Tensor) or factor.numel() == 1:
            return ids.expand(result.shape)
        if kind(node) == "div" and b is not None:
            return self.opaque(node, result, [node.args[1]], "division")  # type: ignore[list-item]
        return self.factor(node, ids.expand(result.shape), factor, node.args[1] if b is None else node.args[0])

    _see_div = _see_mul

    def product(self, node: fx.Node, a: Tensor, b: Tensor) -> Tensor:
        """Of two activations: channels pass where the other has one number for each row, and are new ones else."""
        shape = torch.broadcast_shapes(a.shape, b.shape)
        for x, rows in ((a, b),) if kind(node) == "div" else ((a, b), (b, a)):
            if rows.shape[-1:] == (1,) and x.shape[-1] > 1 and not varies_together(x.expand(shape), _places(rows)):
                self.freeze(rows, node, "it is a factor of whole rows")
                return x.expand(shape)
        a, b = compact(a, b)
        self.freeze(a, node, "it is multiplied by another activation")
        self.freeze(b, node, "it is multiplied by another activation")
        for axis in range(a.dim() - 1):  # channels of the result: not one more for every token of a rotary embedding
            if 0 in (a.stride(axis), b.stride(axis)):
                a, b = a[(slice(None),) * axis + (slice(1),)], b[(slice(None),) * axis + (slice(1),)]  # none of none
        return self.renamed(node, a.clamp(min=0).long() * self.found.total + b.clamp(min=0)).expand(shape)

    def factor(self, node: fx.Node, ids: Tensor, factor: Tensor, origin: Any) -> Tensor:
        """X * t: coordinates that meet the same factors may still be mixed with each other."""
        cells = torch.arange(factor.numel()).reshape(factor.shape)
        if not varies_together(ids, cells):
            return ids
        if factor.numel() == ids.shape[-1] == factor.shape[-1]:
            self.freeze(ids, node, "a gain per channel is multiplied in")
            names = self.weights_of(origin)
            source = self.new("gain", node, factor.numel(), fqn=",".join(names) if names else "")
            x = next(n for n in node.all_input_nodes if n is not origin)
            self.found.gains.append(Gain(node, x, origin, source))
            return (cells + source.base).expand(ids.shape)
        self.split(ids, cells)
        return ids

    def _see_index_add(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Rows added to rows (experts' outputs to their tokens): all rows of the source join what they are added to."""
        target, source = self.shadow(node.args[0]), self.shadow(node.args[3]) if len(node.args) > 3 else None
        if target is None or source is None or kwargs:
            return self.opaque(node, result, [n for n in node.all_input_nodes if self.shadow(n) is not None], kind(node))
        axis = args[1] % target.dim()
        row = torch.maximum(row_of(self, target, [axis]), row_of(self, source, [axis]))
        self.join(source, row.expand(source.shape))
        self.freeze_beside_constants(source, row, node)
        joined = any_row(self, node, torch.where(target == ZERO, row, target), [axis], source)
        return self.write(node, joined) if mutates(node) else joined

    def _see_read(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        self.opaque(node, None, list(node.all_input_nodes), kind(node))

    # -- reductions, attention, norms ------------------------------------------------------------------------------
    def _see_mean(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        ids = self.shadow(node.args[0])
        if ids is None:
            return None
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(dims, int | tuple | list):
            return self.opaque(node, result, [node.args[0]], kind(node))  # type: ignore[list-item]
        best = ids
        for dim in [dims] if isinstance(dims, int) else list(dims):
            best = first(best, dim)
        expanded = best.expand(ids.shape)
        few, other = compact(ids, expanded)
        if ids.shape[-1] > 1 and best.shape[-1] == 1 and ((few != other) & (few >= 0)).any():  # channels meet
            return self.opaque(node, result, [node.args[0]], kind(node))  # type: ignore[list-item]
        self.join(ids, expanded)
        self.freeze_beside_constants(ids, best, node)
        return best.reshape(result.shape)

    _see_sum = _see_mean

    def _see_avg_pool2d(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Places are averaged or resampled, each channel (axis 1) by itself and all in the same way."""
        ids = self.shadow(node.args[0] if node.args else node.kwargs.get("input"))
        if ids is None or ids.dim() < 3:
            return None if ids is None else self.opaque(node, result, [node.args[0]], kind(node))  # type: ignore[list-item]
        places = tuple(range(2, ids.dim()))
        row = ids.amax(places, keepdim=True)
        self.join(ids, row.expand(ids.shape))
        self.freeze_beside_constants(ids, row, node)
        return row.expand(result.shape)

    _see_avg_pool1d = _see_avg_pool3d = _see_adaptive_avg_pool2d = _see_interpolate = _see_grid_sample = _see_avg_pool2d

    def _see_matmul(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        a, b = self.shadow(node.args[0]), self.shadow(node.args[1])
        if a is None and b is not None and b.dim() >= 2:
            return self.mix_tokens(b, result, args[0].shape[:-2])
        self.freeze(a, node, "matmul with something that is no weight of a linear")
        self.freeze(b, node, "matmul with something that is no weight of a linear")
        if a is None or b is not None:
            return None
        return self.along_last(self.new("op", node, result.shape[-1]), result)

    def mix_tokens(self, ids: Tensor, result: Tensor, groups: torch.Size, grouped: bool = False) -> Tensor:
        """Rows of V are averaged, head by head: channels stay channels, heads stay apart; ``grouped`` queries share V's."""
        row = first(ids, -2)
        self.join(ids, row.expand(ids.shape))
        self.freeze_beside_constants(ids, row, self.prog.graph._root)
        if grouped:
            row = row.repeat_interleave(result.shape[-3] // row.shape[-3], -3)
        cells = torch.arange(max(1, groups.numel())).reshape(*groups, 1, 1) if groups else torch.zeros(1, 1, dtype=torch.long)
        row = row.expand(*result.shape[:-2], 1, result.shape[-1])
        if varies_together(row, cells):
            self.split(row, cells)
        return row.expand(result.shape)

    def _see_scaled_dot_product_attention(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(("query", "key", "value"), node.args, strict=False)) | dict(node.kwargs)
        self.freeze(self.shadow(named["query"]), node, "attention scores")
        self.freeze(self.shadow(named["key"]), node, "attention scores")
        ids = self.shadow(named["value"])
        if ids is None:
            return None
        return self.mix_tokens(ids, result, result.shape[:-2], grouped=bool(kwargs.get("enable_gqa")))

    def _see_rms_norm(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        ids = self.shadow(node.args[0])
        if ids is None or node.op != "call_function" or len(args) != 2:
            return self.opaque(node, result, [node.args[0]], "rms_norm") if ids is not None else None  # type: ignore[list-item]
        row = self.columns(ids)
        self.meet(node, node.args[0], row)
        self.found.norms.append((node, row))
        self.split(row, torch.zeros_like(row))
        return ids if self.through_norms else self.renamed(node, ids)

    def _see_layer_norm(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        ids = self.shadow(node.args[0])
        if ids is None:
            return None
        if node.target is not layer_norm:
            return self.opaque(node, result, [node.args[0]], "layer_norm")  # type: ignore[list-item]
        row = self.columns(ids)
        self.meet(node, node.args[0], row)
        self.found.norms.append((node, row))
        if self.through_norms:
            self.split(row, torch.zeros_like(row))
            return ids
        self.freeze(row, node, MEAN)
        return self.renamed(node, ids)

    # -- weights ---------------------------------------------------------------------------------------------------
    def columns(self, ids: Tensor) -> Tensor:
        """One id for each position of the last axis; the others found there are joined to it."""
        few = compact(ids)[0]
        rows = few.expand(*few.shape[:-1], ids.shape[-1]).reshape(-1, ids.shape[-1])
        best = first(rows, 0)[0]
        self.join(rows, best.expand(rows.shape))
        self.freeze_beside_constants(rows, best, self.prog.graph._root)
        return best

    def _see_contraction(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        """A product with a stored weight reads one of its axes and writes the other; experts share both."""
        use = self.found.contractions[node]
        ids, row = self.shadow(use.x), None
        if isinstance(ids, Tensor) and not ids.numel():
            self.found.idle.add(node)
        elif isinstance(ids, Tensor):
            row = self.columns(ids.movedim(use.channel, -1))
            self.meet(node, use.x, row, use.channel)
            self.split(row, torch.zeros_like(row))
            self.join(row, self.columns_of.setdefault((use.fqn, use.reads), row))
        if node not in self.found.idle:
            self.found.readers.append(Reader(node, use.fqn, row, use.reads))
        word = "conv" if kind(node) == "conv" else "linear"
        source = self.new(word, node, result.shape[use.channel], fqn=use.fqn, axis=use.writes)
        known = torch.arange(source.base, source.base + source.size)
        self.split(known, torch.zeros_like(known))
        bias = operands(node)["bias"]
        if isinstance(bias, fx.Node) and bias.op != "get_attr":
            self.freeze(self.shadow(bias), node, f"it is the bias of a {word}")
            self.freeze(known, node, f"the bias of this {word} is computed")
        return known.reshape(-1, *[1] * (-1 - use.channel)).expand(result.shape)

    def _see_linear(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        named = operands(node)
        for word in ("input", "weight", "bias"):
            ids = self.shadow(named[word])
            reason = "the weight of this linear is computed" if word == "input" else f"it is the {word} of a linear"
            self.freeze(ids if isinstance(ids, Tensor) else None, node, reason)
        return self.along_last(self.new("op", node, result.shape[-1]), result)

    def _see_embedding(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(("input", "weight"), node.args, strict=False)) | dict(node.kwargs)
        weight = named["weight"]
        if not (isinstance(weight, fx.Node) and weight.op == "get_attr"):
            return None
        return self.along_last(self.new("embedding", node, result.shape[-1], fqn=str(weight.target), axis=1), result)

    def _see_conv(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        named = operands(node)
        self.freeze(self.shadow(named["input"]), node, "a grouped or transposed convolution reads it")
        rank = (kwargs["weight"] if "weight" in kwargs else args[1]).dim()
        axis = result.dim() - rank + 1
        source = self.new("op", node, result.shape[axis])
        ids = torch.arange(source.base, source.base + source.size)
        return ids.reshape(-1, *[1] * (result.dim() - axis - 1)).expand(result.shape)

    def _see_setitem(self, node: fx.Node, result: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        target, value = node.args[0], node.args[2]
        ids, new = self.shadow(target), self.shadow(value)
        if ids is None and new is None:
            return None
        if ids is None:
            ids = self.found.shadows[target] = torch.full(args[0].shape, ZERO if is_zero(args[0]) else CONSTANT)  # type: ignore[index]
        if new is None:
            new = ZERO if is_zero(args[2]) else CONSTANT
        ids[self.ids_for(node.args[1], args[1])] = new
        ids.copy_(any_row(self, node, ids, chosen_axes(node.args[1], args[1], ids.dim()), new))
        return None


def _places(t: Tensor) -> Tensor:
    """A number of its own for every element."""
    return torch.arange(t.numel()).reshape(t.shape)


def _is_vector(value: Any) -> bool:
    """One element per channel."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == value.shape[-1] > 1
