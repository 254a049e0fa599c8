"""Linears that read one tensor quantize it token by token once: q, k and v, gate and up.

    quantize_per_token(x, order, K_p, bits)  twice  ->  once

Shapes:  those of ops/quantize_per_token.py
Why:     scales are found as x comes, so equal operands give equal codes; nothing of the values has to be known.
Needs:   nothing
Gives:   nothing
Exact:   yes, to the bit
Refuses: parts of other widths or bits; orders that are other tensors, whatever numbers they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..graph.program import Miss, Program


@dataclass(frozen=True)
class Site:
    """A quantization that an earlier one stands for."""

    node: fx.Node
    first: fx.Node

    def __str__(self) -> str:
        return f"{self.node.name} is {self.first.name}"


@dataclass(frozen=True)
class SharePerToken:
    """See the module's docstring."""

    name: ClassVar[str] = "share_per_token"
    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Quantizations of one tensor, the later ones."""
        seen: dict[object, dict[str, fx.Node]] = {}
        for node in prog.nodes("quantize_per_token"):
            earlier = seen.setdefault(node.args[0], {})
            first = earlier.setdefault(repr(node.args[1:]), node)
            if first is not node:
                yield Site(node, first)
            elif len(earlier) > 1:
                yield Miss(node.name, "an earlier quantization of the same tensor has other parts, or another order")

    def rewrite(self, prog: Program, site: Site) -> None:
        """Let the readers of the later one read the first."""
        site.node.replace_all_uses_with(site.first)
