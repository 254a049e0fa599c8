"""Let attention run on queries, or keys and values, in modality order: the mask takes their order.

    attention(P q, P k, P v, P M P^T) = P attention(q, k, v, M)          M: whatever mask there was, boolean or float
    is_causal                         ->  M[i, j] = pos(j) <= pos(i)     equation 9 of the paper, for any layout

Shapes:  q, k, v [B, H, L, D]   M [B or 1, H or 1, L, L']   pos int64 [B, L]: a token's place in its sequence
Why:     q and the output need no gather; with a KV cache keys and values are written in sequence order, and only the rows
         of M are permuted (causal, sliding window, bidirectional images and padding alike: M is taken as it is).
Needs:   nothing; does what reorder_tokens left to do
Gives:   nothing that the next pass must rely on
Exact:   yes, up to the order in which the softmax sums
Refuses: attention in a form that does not commute with a permutation of its queries; dropout; all of it under "gather".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.sizes import sizes
from mmqc.graph.tokens.moves import BACK, KEYS, MOVED, PENDING, Moves
from mmqc.graph.tokens.uses import ATTENTION, Use, attention, is_attention

ALSO_ATTENTION = ("flex_attention", "multi_head_attention_forward")


@dataclass(frozen=True)
class Site:
    """One attention and the nodes that only it needs, in order."""

    attention: fx.Node
    nodes: tuple[fx.Node, ...]
    queries: bool
    keys: bool
    mask: str

    def __str__(self) -> str:
        order = {True: "modality", False: "sequence"}
        return (
            f"{self.attention.name}: queries in {order[self.queries]} order, keys and values in {order[self.keys]} order; "
            f"{self.mask}"
        )


@dataclass(frozen=True)
class RewriteMask(Pass):
    """``attention`` is "gather" or "unified"."""

    attention: str = "gather"
    name = "rewrite_mask"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every attention behind reorder_tokens."""
        if not prog.nodes("modality_order"):
            return
        calls = attention_calls(prog)
        if self.attention == "gather":
            if calls:
                yield Miss(calls[0].name, f"gather: {len(calls)} attention calls keep sequence order, and their masks")
            return
        number = {n: i for i, n in enumerate(prog.graph.nodes)}
        claimed: set[fx.Node] = set()
        for node in calls:
            queries, keys = PENDING in node.meta, bool(node.meta.get(KEYS))
            if not queries and not keys:
                if MOVED not in node.meta:
                    yield Miss(node.name, self.why_not(prog, node))
                continue
            nodes = [n for n in (*_before(node), *_behind(node)) if n not in claimed]
            claimed.update(nodes)
            nodes.sort(key=number.__getitem__)
            yield Site(node, tuple(nodes), queries, keys, _mask(node))

    def why_not(self, prog: Program, node: fx.Node) -> str:
        """Why an attention stays in sequence order."""
        uses = Moves.rules(prog).operands(node, len(sizes(node) or ()) - 2)
        return f"{uses}: it stays in sequence order" if isinstance(uses, str) else "in sequence order fewer bytes move"

    def rewrite(self, prog: Program, site: Site) -> None:
        """Permute what the attention reads; build the mask that ``is_causal`` stood for."""
        moves = Moves.known(prog)
        for node in site.nodes:
            if kind(node) == ATTENTION:
                _by_name(node)
            keys = None
            if node.meta.pop(KEYS, False):
                keys = self.permute_keys(moves, node)
            causal = kind(node) == ATTENTION and bool(node.kwargs.get("is_causal"))
            if PENDING in node.meta:
                moves.settle(node, self.name)
            if kind(node) == ATTENTION:
                self.permute_mask(moves, node, keys, causal, MOVED in node.meta)

    def permute_keys(self, moves: Moves, node: fx.Node) -> fx.Node:
        """Keys and values in modality order; the permutation."""
        for operand in dict.fromkeys(node.args[1:3]):
            assert isinstance(operand, fx.Node)
            rank = len(sizes(operand) or ())
            moves.replace(node, operand, Use(rank - 2, rank), self.name, 0)
        return moves.order

    def permute_mask(self, moves: Moves, node: fx.Node, keys: fx.Node | None, causal: bool, queries: bool) -> None:
        """The mask's last axis follows the keys; a causal flag becomes a mask."""
        mask = node.kwargs.get("attn_mask")
        if causal:
            key = node.args[1]
            with moves.prog.graph.inserting_before(node):
                made = moves.prog.graph.call_function(torch.ops.mmqc.causal_mask.default, (moves.order, keys, key))
            assert queries, "keys alone are never moved under a causal flag"
            copy_meta(made, node, self.name, 0)
            node.kwargs = {**node.kwargs, "attn_mask": made, "is_causal": False}
        elif keys is not None and isinstance(mask, fx.Node) and (sizes(mask) or (0,))[-1] != 1:
            rank = len(sizes(node) or ())
            made = moves.permuted(mask, Use(rank - 1, rank), node, self.name, 0)
            node.kwargs = {**node.kwargs, "attn_mask": made}


def attention_calls(prog: Program) -> list[fx.Node]:
    """Attention whose queries are these tokens: other towers have their own."""
    found = []
    for node in prog.nodes("softmax", ATTENTION, *ALSO_ATTENTION):
        size = sizes(node) or ()
        if kind(node) == ATTENTION and not is_attention(node):
            continue
        ours = len(size) >= 3 and (size[0], size[-2]) == tuple(Moves.rows(prog))
        if ours or node.meta.get(KEYS) or PENDING in node.meta:
            found.append(node)
    return found


def _by_name(node: fx.Node) -> None:
    """Query, key and value by position, the rest by name."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    node.args = tuple(given.pop(word) for word in names[:3])
    node.kwargs = given


def _before(node: fx.Node) -> list[fx.Node]:
    """Pending nodes that make the mask, or the scores down to their product."""
    start = [attention(node).get("attn_mask")] if kind(node) == ATTENTION else node.all_input_nodes
    found: list[fx.Node] = [node]
    todo = [n for n in start if isinstance(n, fx.Node)]
    while todo:
        current = todo.pop()
        if PENDING not in current.meta or current in found or BACK in current.meta:
            continue
        found.append(current)
        if kind(current) != "matmul":
            todo += current.all_input_nodes
    return found


def _behind(node: fx.Node) -> list[fx.Node]:
    """Pending nodes between a softmax and its product with the values."""
    found: list[fx.Node] = []
    todo = list(node.users) if kind(node) == "softmax" else []
    while todo:
        current = todo.pop()
        if PENDING in current.meta and current not in found:
            found.append(current)
            todo += current.users if kind(current) != "matmul" else []
    return found


def _mask(node: fx.Node) -> str:
    if kind(node) != ATTENTION:
        return "its scores are in the queries' order"
    given = attention(node)
    mask = given.get("attn_mask")
    if isinstance(mask, fx.Node):
        return f"mask {mask.name} permuted"
    return "is_causal became a mask of positions" if given.get("is_causal") else "it has no mask"
