"""One new token's attention reads each key and value head once, not once for every query head of its group.

    sdpa(q [B, H, 1, D], repeat(k, r), repeat(v, r), mask)  ->  sdpa(q [B, H/r, r, D], k, v, mask) as [B, H, 1, D]

Shapes:  k, v [B, H/r, S, D], which ``repeat`` writes out as [B, H, S, D]   mask [B or 1, 1, 1, S] or none
Why:     with a mask, transformers repeats the heads in memory: at decode that is r times the cache, written and read in every
         layer.  The queries of a group are rows of one head as well: no row sees another.
Needs:   nothing
Gives:   nothing
Exact:   yes
Refuses: more than one new token (a group's rows would mix with the tokens' order under a causal mask); a mask per query head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.sizes import EXAMPLE, sizes, value_of

ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Site:
    """An attention, and its keys and values before they are repeated."""

    node: fx.Node
    key: fx.Node
    value: fx.Node
    heads: int
    group: int
    widths: tuple[int, int]  # of a query and of a value

    def __str__(self) -> str:
        return f"{self.node.name}: {self.group} query heads for each of {self.key.name}"


@dataclass(frozen=True)
class FoldQueryGroups(Pass):
    name = "fold_query_groups"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Attentions of one query a head over repeated keys and values."""
        for node in filter(one_query, prog.graph.nodes):
            query, key, value = (*node.args, None, None, None)[:3]
            key, value, shape = unrepeated(key), unrepeated(value), sizes(query)
            if key is None or value is None or shape is None:
                continue
            keys, values = sizes(key), sizes(value)
            if keys is None or values is None or keys[1] != values[1]:
                continue
            if len(node.args) > 3 or node.kwargs.get("is_causal") or not one_for_all(node.kwargs.get("attn_mask")):
                yield Miss(node.name, "its mask is not one for all heads")
            else:
                yield Site(node, key, value, keys[1], shape[1] // keys[1], (shape[3], values[3]))

    def rewrite(self, prog: Program, site: Site) -> None:
        """Queries by group, and their results back in the order of heads."""
        node = site.node
        width, out = site.widths
        with prog.graph.inserting_before(node):
            rows = prog.graph.call_method("reshape", (node.args[0], -1, site.heads, site.group, width))
            y = prog.graph.call_function(node.target, (rows, site.key, site.value), node.kwargs)  # type: ignore[arg-type]
            back = prog.graph.call_method("reshape", (y, -1, site.heads * site.group, 1, out))
        for new in (rows, y, back):
            copy_meta(new, node, self.name, 0)
        for new, old, channels in ((rows, node.args[0], width), (y, node, out)):
            if isinstance(value := value_of(old), Tensor):
                new.meta[EXAMPLE] = value.reshape(value.shape[0], site.heads, site.group, channels)
        node.replace_all_uses_with(back)


def one_query(node: fx.Node) -> bool:
    """Whether a node is the attention of one new token."""
    shape = sizes(node.args[0]) if kind(node) == ATTENTION and node.args else None
    return shape is not None and len(shape) == 4 and shape[2] == 1


def one_for_all(mask: object) -> bool:
    """Whether a mask, if there is one, is the same for all heads."""
    shape = sizes(mask)
    return mask is None or (shape is not None and len(shape) == 4 and shape[1] == 1)


def unrepeated(flat: object) -> fx.Node | None:
    """K [B, h, S, D] of reshape(expand(k[:, :, None] or k.unsqueeze(2), r), [B, h r, S, D]); None for anything else."""
    wide = operand(flat, "reshape", "view")
    narrow = operand(wide, "expand")
    k = operand(narrow, "getitem", "unsqueeze")
    before, between, after = sizes(k), sizes(wide), sizes(flat)
    if k is None or before is None or between is None or after is None or len(before) != 4 or len(between) != 5:
        return None
    b, h, s, d = before
    group = between[2]
    new_axis = narrow.args[1:] in (((*[slice(None)] * 2, None, *[slice(None)] * 2),), (2,))  # type: ignore[union-attr]
    repeated = new_axis and between == (b, h, group, s, d) and after == (b, h * group, s, d)
    return k if repeated and isinstance(h, int) and isinstance(group, int) else None


def operand(node: object, *words: str) -> fx.Node | None:
    """What a node of one of these kinds reads first; None for another node."""
    found = node.args[0] if isinstance(node, fx.Node) and kind(node) in words else None
    return found if isinstance(found, fx.Node) else None
