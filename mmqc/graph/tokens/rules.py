"""How operations treat the order of tokens: along which axis of which operands the tokens of a result come.

For a node f and an axis t of its result, ``TokenRules.operands`` answers with the operands whose tokens have to be put in
another order so that the result is in that order and nothing else changes,

    f(P x, P y, z) = P f(x, y, z)           P permutes the axis t, for every index of axis 0 in its own way

or with the reason why there is no such answer.  The answers hold for every permutation: they are about the operation and
the shapes, never about what the values mean, so that a wrong guess of where the tokens are costs time and not truth.  An
operation that is not named here does not commute.

With ``flat``, P permutes axes 0 and 1 together (all rows of the batch) and the result has the axes [1, N] in their place:
then only row-wise operations are left, and nothing that was told a size.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from mmqc.graph.kinds import kind, mutates
from mmqc.graph.sizes import Sizes, is_sequence, product, sizes
from mmqc.graph.tokens.uses import ELEMENTWISE, FIRST_ONLY, OURS, RESHAPES, Use, Uses, attention, is_ours_or_torchs, named


class TokenRules:
    """The rules for one sequence axis; ``batch`` and ``length`` are the sizes of its axes."""

    def __init__(self, batch: Any, length: Any, flat: bool = False) -> None:
        self.batch, self.length, self.flat = batch, length, flat

    def operands(self, node: fx.Node, axis: int) -> Uses | str:
        """The operands that carry the tokens of the result's ``axis``, or why the operation does not commute."""
        word, size = kind(node), sizes(node)
        reason = self.why_not(node, word, size, axis)
        if reason or size is None:
            return reason
        if word in ELEMENTWISE:
            return self.elementwise(node, size, axis)
        if word in FIRST_ONLY:
            return self.same(node.args[0], axis, size)
        if word in RESHAPES:
            return self.reshaped(node, size, axis)
        if word in OURS:
            return self.rows(node, {"x": node.args[0]}, axis)
        rule = getattr(self, "_of_" + word.replace(":", "_"), None)
        return f"{word} is not known to act on every token by itself" if rule is None else rule(node, size, axis)

    def why_not(self, node: fx.Node, word: str, size: Sizes | None, axis: int) -> str:
        """Why no rule is asked, or nothing."""
        if node.op not in ("call_function", "call_method") or size is None:
            return f"{word} is no operation on tensors of known shape"
        if axis < 1 or axis >= len(size) or size[0] != self.batch or size[axis] != self.length:
            return f"{word} has no tokens there"
        if self.length == 1:
            return "one token has no order"
        if self.flat and axis != 1:
            return f"{word} has no rows of tokens"
        if mutates(node) or node.kwargs.get("out") is not None:
            return f"{word} writes in place"
        if not is_ours_or_torchs(node) or not node.args:
            return f"{node.target} is not known to act on every token by itself"
        return ""

    # -- helpers ---------------------------------------------------------------------------------------------------
    def aligned(self, operand: Any, size: Sizes, axis: int) -> Use | str | None:
        """How an operand of an element-wise operation with a result of ``size`` has its tokens; None if it has none."""
        own = sizes(operand)
        if own is None:
            return None
        at = axis - (len(size) - len(own))
        if self.flat:
            lead = own[: max(0, len(own) - (len(size) - 2))]
            if all(s == 1 for s in lead):
                return None if len(own) < len(size) or own[1] != self.length else Use(1, len(size))
            if lead != (self.batch, self.length):
                return "an operand is broadcast over the batch or over its tokens alone"
            return Use(1, len(size))
        if at < 0 or own[at] == 1:
            return None
        if own[at] != self.length:
            return "an operand's size along the tokens is unknown"
        return Use(axis, len(size))

    def elementwise(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        """Operands are aligned at the right: each is indexed by the result's own index."""
        found: Uses = {}
        for operand in node.all_input_nodes:
            use = self.aligned(operand, size, axis)
            if isinstance(use, str):
                return use
            if use is not None:
                found[operand] = use
        return found or "no operand has tokens"

    def same(self, operand: Any, axis: int, size: Sizes) -> Uses | str:
        """The result has the operand's shape."""
        own = sizes(operand)
        if own != size:
            return "the operand has another shape"
        return {operand: Use(axis, len(size))}

    def rows(self, node: fx.Node, operands: dict[str, Any], axis: int) -> Uses | str:
        """An operation over the last axis of ``x``; ``visual`` beside it has one entry a row."""
        size = sizes(node)
        x = operands["x"]
        own = sizes(x)
        if own is None or size is None or len(own) != len(size) or axis >= len(size) - 1:
            return "it mixes the axis of the tokens"
        found: Uses = {x: Use(axis, len(size))}
        visual = operands.get("visual")
        if isinstance(visual, fx.Node):
            use = self.aligned(visual, size[:-1], axis)
            if isinstance(use, str):
                return use
            if use is not None:
                found[visual] = use
        others = [n for n in node.all_input_nodes if n not in found]
        if any(a is b for a in (x, visual) for b in others):
            return "an operand has two roles"
        return found

    def reshaped(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        """The sizes in front of the tokens and behind them have the same products on both sides."""
        x = node.args[0]
        own = sizes(x)
        if own is None or own[0] != size[0]:
            return "the batch is reshaped"
        if self.flat and (own[:2] != size[:2] or not self.keeps_rows(node, len(own), len(size))):
            return "it was told the sizes of the sequence"
        for at in range(1, len(own)):
            if own[at] == size[axis] and product(own[:at]) == product(size[:axis]):
                return {x: Use(at, len(own))}  # type: ignore[dict-item]
        return "the axis of the tokens is reshaped"

    def keeps_rows(self, node: fx.Node, before: int, after: int) -> bool:
        """Whether the reshape means the same for rows [1, N, ...]: it names an axis behind them, and no size of theirs."""
        word, dim = kind(node), node.args[1] if len(node.args) > 1 else None
        rank = after if word == "unsqueeze" else before
        return word in ("unsqueeze", "squeeze", "flatten", "unflatten") and isinstance(dim, int) and dim % rank >= 2

    def _dim(self, node: fx.Node, given: Any, rank: int) -> int | None:
        return given % rank if isinstance(given, int) else None

    # -- linears, norms, reductions --------------------------------------------------------------------------------
    def _of_linear(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "input", "weight", "bias")
        if any(n is given["input"] for n in (given["weight"], given.get("bias"))):
            return "an operand has two roles"
        if len(sizes(given.get("bias")) or ()) > 1:
            return "the bias differs from row to row"
        return self.rows(node, {"x": given["input"]}, axis)

    def _of_quantize(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "x", "scale", "visual", "bits")
        return self.rows(node, {"x": given["x"], "visual": given.get("visual")}, axis)

    def _of_scaled_matmul(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "x", "w_q", "x_scale", "w_scale", "bias", "visual")
        return self.rows(node, {"x": given.get("x", given.get("x_q")), "visual": given.get("visual")}, axis)

    def _of_tag_modality(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        return self.rows(node, {"x": node.args[0], "visual": node.args[1]}, axis)

    def _of_rms_norm(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "input", "shape")
        last = given.get("normalized_shape", given.get("shape"))
        count = len(last) if isinstance(last, tuple | list) else 1
        if axis >= len(size) - count:
            return "it normalises over the tokens"
        found = self.same(node.kwargs.get("input", node.args[0] if node.args else None), axis, size)
        if not isinstance(found, str) and any(len(sizes(n) or ()) > count for n in node.all_input_nodes if n not in found):
            return "a gain differs from row to row"
        return found

    _of_layer_norm = _of_rms_norm

    def _of_embedding(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        ids = named(node, "input", "weight")["input"]
        if axis >= len(size) - 1 or sizes(ids) != size[:-1]:
            return "it mixes the axis of the tokens"
        return {ids: Use(axis, len(size) - 1)}

    def _of_dropout(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "input", "p", "training")
        if given.get("training", True) is not False and given.get("p", 0.5) != 0:
            return "dropout draws other numbers for another order"
        return self.same(given["input"], axis, size)

    def _of_softmax(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "input", "dim")
        if self._dim(node, given.get("dim"), len(size)) in (None, axis):
            return "softmax over the tokens"
        return self.same(given["input"], axis, size)

    _of_log_softmax = _of_softmax

    def _of_mean(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "input", "dim", "keepdim")
        x, dims = given["input"], given.get("dim")
        own = sizes(x)
        dims = [dims] if isinstance(dims, int) else dims
        if own is None or not isinstance(dims, tuple | list) or not all(isinstance(d, int) for d in dims):
            return "a reduction over all axes"
        if min(d % len(own) for d in dims) <= axis:
            return "a reduction over the tokens or an axis in front of them"
        return {x: Use(axis, len(own))}

    _of_sum = _of_amax = _of_amin = _of_var = _of_mean

    # -- products --------------------------------------------------------------------------------------------------
    def _of_matmul(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        if self.flat:
            return "a product of activations"
        a, b = (node.kwargs.get(k, v) for k, v in zip(("input", "other"), node.args, strict=False))
        if a is b or len(sizes(a) or ()) < 2 or len(sizes(b) or ()) < 2:
            return "an operand has two roles or no rows"
        if axis == len(size) - 2:
            return {a: Use(axis, len(size))}  # type: ignore[dict-item]
        if axis == len(size) - 1:
            return {b: Use(axis, len(size))}  # type: ignore[dict-item]
        found: Uses = {}
        for operand in (a, b):
            use = self.aligned(operand, size, axis)
            if isinstance(use, str):
                return use
            if use is not None:
                found[operand] = use  # type: ignore[index]
        return found or "no operand has tokens"

    def _of_scaled_dot_product_attention(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = attention(node)
        query, mask = given["query"], given.get("attn_mask")
        if self.flat or axis != len(size) - 2:
            return "attention mixes tokens"
        if given.get("dropout_p", 0.0) != 0.0:
            return "dropout draws other numbers for another order"
        if query in (given["key"], given["value"], mask):
            return "an operand has two roles"
        found: Uses = {query: Use(axis, len(sizes(query) or ()))}
        use = self.aligned(mask, (*size[:-1], 0), axis) if isinstance(mask, fx.Node) else None
        if isinstance(use, str):
            return use
        return found | ({mask: use} if use is not None else {})  # type: ignore[dict-item]

    # -- what moves data -------------------------------------------------------------------------------------------
    def _of_permute(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        dims = node.kwargs.get("dims", node.args[1] if len(node.args) == 2 else node.args[1:])
        dims = list(dims) if isinstance(dims, tuple | list) else list(node.args[1:])
        return self.moved(node, size, axis, [d % len(size) for d in dims])  # type: ignore[operator]

    def _of_transpose(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "input", "dim0", "dim1")
        a, b = given["dim0"] % len(size), given["dim1"] % len(size)
        dims = list(range(len(size)))
        dims[a], dims[b] = b, a
        return self.moved(node, size, axis, dims)

    def moved(self, node: fx.Node, size: Sizes, axis: int, dims: list[int]) -> Uses | str:
        """Axis i of the result is axis dims[i] of the operand."""
        if dims[0] != 0 or (self.flat and dims[1] != 1):
            return "the batch changes its place"
        return {node.args[0]: Use(dims[axis], len(size))}  # type: ignore[dict-item]

    def _of_expand(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        if self.flat:
            return "it was told the sizes of the sequence"
        use = self.aligned(node.args[0], size, axis)
        return use if isinstance(use, str) else {node.args[0]: use} if use else "no operand has tokens"  # type: ignore[dict-item]

    def _of_cat(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "tensors", "dim")
        parts, dim = given["tensors"], self._dim(node, given.get("dim", 0), len(size))
        if dim is None or dim in (0, axis) or (self.flat and dim < 2):
            return "tokens are concatenated"
        found: Uses = {}
        for part in parts:
            own = sizes(part)
            if own is None or len(own) != len(size) or own[0] != self.batch or own[axis] != self.length:
                return "tokens are concatenated"
            found[part] = Use(axis, len(size))
        return found

    def _of_split(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "input", "sections", "dim")
        own = sizes(given["input"])
        dim = self._dim(node, given.get("dim", 0), len(size))
        if own is None or len(own) != len(size) or dim is None or dim in (0, axis) or (self.flat and dim < 2):
            return "tokens are split"
        return {given["input"]: Use(axis, len(size))}

    _of_chunk = _of_split_with_sizes = _of_tensor_split = _of_split

    def _of_getitem(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        x, index = node.args[0], node.args[1]
        own = sizes(x)
        if own is None or not isinstance(x, fx.Node):
            return "its operand is no tensor"
        if is_sequence(x):
            whole = self.operands(x, axis)
            return whole if isinstance(whole, str) else {x: Use(axis, len(own))}
        return self.indexed(x, index if isinstance(index, tuple) else (index,), own, axis)

    def indexed(self, x: fx.Node, index: tuple[Any, ...], own: Sizes, axis: int) -> Uses | str:
        """``x[index]``: where the result's axis comes from."""
        source, target = 0, 0
        named_axes = sum(1 for i in index if i is not None and i is not Ellipsis)
        for item in index if Ellipsis in index else (*index, Ellipsis):
            if item is None:
                target += 1
                if self.flat and target <= 2:
                    return "an axis is put in front of the tokens"
                continue
            if isinstance(item, bool) or not (isinstance(item, int | slice) or item is Ellipsis):
                return "it is indexed by a tensor"
            if source == 0 and (target != 0 or not _is_all(item)):
                return "the batch is indexed"
            width = len(own) - named_axes if item is Ellipsis else 1
            if target <= axis < target + width and not isinstance(item, int):
                if not _is_all(item):
                    return "tokens are sliced"
                if self.flat and source + axis - target != 1:
                    return "an axis in front of the tokens is indexed"
                return {x: Use(source + axis - target, len(own))}
            source += width
            target += 0 if isinstance(item, int) else width
        return "the axis of the tokens is new"

    def _of_index_select(self, node: fx.Node, size: Sizes, axis: int) -> Uses | str:
        given = named(node, "input", "dim", "index")
        dim = self._dim(node, given["dim"], len(size))
        if dim is None or dim in (0, axis) or (self.flat and dim < 2):
            return "tokens are selected"
        return {given["input"]: Use(axis, len(size))}


def _is_all(item: Any) -> bool:
    """Whether an index takes everything along its axis."""
    if not isinstance(item, slice):
        return item is Ellipsis
    return item.start in (None, 0) and item.stop is None and item.step in (None, 1)
