"""Compute the language model's row-wise work in modality order: all visual tokens in front of all text.

    x <- P x  behind the merge,   n = P^-1 f(P x)  for every row-wise f,   P from the visual mask, in the graph

Shapes:  visual bool [B, L]   gather: x [B, L, ...] <-> [1, B L, ...], one P for the batch   unified: one P a sequence
Why:     tokens of one modality side by side have one static scale, so that a kernel splits its rows at one index instead
         of choosing a scale for each (MQuant's AIFS, arXiv:2502.00425, section 4.1).
Needs:   nothing: a graph without a visual mask is left alone
Gives:   nothing that the next pass must rely on
Exact:   yes: rows change their places, not their values
Refuses: a graph whose sequences have one token; a quantized linear whose rows are not the mask's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program
from mmqc.graph.runner import Pass
from mmqc.graph.sizes import is_sequence, sizes
from mmqc.graph.tokens.moves import KEYS, PENDING, Moves
from mmqc.graph.tokens.rules import TokenRules
from mmqc.graph.tokens.tokens import Tokens, visual_mask
from mmqc.graph.tokens.uses import Uses


@dataclass(frozen=True)
class Site:
    """The region: what this pass moves, and what it leaves to the passes behind it."""

    tokens: Tokens
    rows: dict[fx.Node, Uses]

    def __str__(self) -> str:
        plan = self.tokens
        borders = ", ".join(f"{n} x {word}" for word, n in plan.borders.most_common())
        how = "one order for the whole batch" if plan.flat else "one order a sequence"
        return (
            f"{len(plan.axis)} operations, {len(plan.forced)} of them quantized or linear, in modality order ({how}); "
            f"{plan.gathers} gathers read and write {plan.moved / 2**20:.3g} MiB; back in sequence order at {borders}"
        )


@dataclass(frozen=True)
class ReorderTokens(Pass):
    """``attention`` is "gather" or "unified"."""

    attention: str = "gather"
    name = "reorder_tokens"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """One region for the whole graph."""
        visual = visual_mask(prog)
        if visual is None or prog.nodes("modality_order"):
            return
        size = sizes(visual) or ()
        if len(size) != 2:
            yield Miss(visual.name, f"the visual mask has {len(size)} axes, not batch and length")
        elif size[1] == 1:
            yield Miss(visual.name, "one token a sequence: there is nothing to reorder")
        else:
            tokens = Tokens.of(prog, visual, flat=self.attention == "gather")
            yield from (Miss(node.name, reason) for node, reason in tokens.refused)
            if not tokens.forced and not tokens.refused:
                yield Miss(visual.name, f"no linear has the rows of the visual mask, {list(size)}")
            if tokens.axis:
                yield Site(tokens, self.rows(prog, tokens))

    def rows(self, prog: Program, tokens: Tokens) -> dict[fx.Node, Uses]:
        """The row-wise part of the region, in order, with the operands that have to be permuted."""
        size = sizes(tokens.visual) or ()
        wise, rules = TokenRules(*size, flat=True), TokenRules(*size, flat=tokens.flat)
        found: dict[fx.Node, Uses] = {}
        for node in prog.graph.nodes:
            axis = tokens.axis.get(node)
            if axis != 1 or isinstance(wise.operands(node, 1), str):
                continue
            whole = node.args[0] if kind(node) == "getitem" else node
            if isinstance(whole, fx.Node) and is_sequence(whole) and whole is not node and whole not in found:
                continue  # a part goes with its whole
            uses = rules.operands(node, axis)
            assert not isinstance(uses, str)
            found[node] = uses
        return found

    def rewrite(self, prog: Program, site: Site) -> None:
        """Permute the rows; mark what the passes for positions and masks have to do."""
        tokens = site.tokens
        moves = Moves.begin(prog, tokens.visual, tokens.flat, self.name)
        for node, axis in tokens.axis.items():
            if node not in site.rows:
                node.meta[PENDING] = axis
        for node in tokens.keys:
            node.meta[KEYS] = True
        for node, uses in site.rows.items():
            moves.conjugate(node, 1, uses, self.name)
