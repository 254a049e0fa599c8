"""Let rotary positions travel with the tokens: queries are rotated in modality order.

    rope(P q, P cos, P sin) = P rope(q, cos, sin)          cos, sin of any kind of position: plain, M-RoPE, per layer

Shapes:  q [B, H, L, D]   cos, sin [B or 1, ..., L, D]
Why:     a rotation belongs to a token's position, not to its row; with it, q goes from its linear to attention, and
         attention's output to the next linear, without a gather.
Needs:   nothing; does what reorder_tokens left to do
Gives:   nothing that the next pass must rely on
Exact:   yes: rows change their places, not their values
Refuses: all of it under "gather", where q, k and v go back to sequence order in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from mmqc.graph.program import Miss, Program
from mmqc.graph.runner import Pass
from mmqc.graph.tokens.moves import PENDING, Moves
from mmqc.passes.rewrite_mask import attention_calls


@dataclass(frozen=True)
class Site:
    """Operations between a linear and attention, in order."""

    nodes: tuple[fx.Node, ...]

    def __str__(self) -> str:
        return f"{self.nodes[0].name} ... {self.nodes[-1].name}: {len(self.nodes)} operations"


@dataclass(frozen=True)
class RewriteRopeIndex(Pass):
    """``attention`` is "gather" or "unified"."""

    attention: str = "gather"
    name = "rewrite_rope_index"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """What is left to move, in connected parts."""
        if not prog.nodes("modality_order"):
            return
        if self.attention == "gather":
            calls = attention_calls(prog)
            if calls:
                yield Miss(calls[0].name, "gather: q and k are in sequence order in front of the rotation, and so are positions")
            return
        left = [n for n in prog.graph.nodes if PENDING in n.meta]
        seen: set[fx.Node] = set()
        for start in left:
            if start not in seen:
                part, todo = set(), [start]
                while todo:
                    node = todo.pop()
                    if node not in part and PENDING in node.meta:
                        part.add(node)
                        todo += [*node.all_input_nodes, *node.users]
                seen |= part
                yield Site(tuple(n for n in left if n in part))

    def rewrite(self, prog: Program, site: Site) -> None:
        """Move every operation; gathers between them cancel."""
        moves = Moves.known(prog)
        for node in site.nodes:
            moves.settle(node, self.name)
