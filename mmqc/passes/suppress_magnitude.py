"""Rotation magnitude suppression: keep the few input channels that a Hadamard made large out of the integer weight.

    y = W_q x_q + W[:, S] x[S]        S = { i : max_j |(W Hᵀ)_ji| > max |W| }

    where S is not empty, the largest other channels are kept beside it, ``rank`` in all

Shapes:  W [N, K]   S int64 [r]
Why:     rows of H with a non-zero sum add up all of W's columns, so some channels of W Hᵀ outgrow W's own maximum and
         set the scale of every row (MQuant, arXiv:2502.00425, section 4.3, equations 11 to 13).
Needs:   ops.raised
Gives:   nothing in the graph: sets ``meta["outliers"]`` on linear nodes
Exact:   yes before quantization: S only says which columns stay in higher precision
Refuses: linears whose inputs are quantized by token, which have no place for such channels; those in which no channel outgrows the
         maximum have no site.
One r:   layers are compiled once where they are alike, and S differs in number from layer to layer; the others can only gain.
S is measured, not taken to be channel 0: for many widths the first row of H is not the one that sums up (11008, 18944).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Miss, Program
from mmqc.graph.runner import Pass
from mmqc.ops.hadamard import apply_factors


@dataclass(frozen=True)
class Site:
    """A linear and the channels that are kept; ``growth``: of the largest, over max |W|."""

    node: fx.Node
    outliers: Tensor
    growth: float

    def __str__(self) -> str:
        return f"{weight_of(self.node)}: channels {self.outliers.tolist()}, up to {self.growth:.2f} x max|W|"


@dataclass(frozen=True)
class SuppressMagnitude(Pass):
    """``rank`` channels a linear, the largest, where one of them outgrows the maximum."""

    rank: int = 8
    name = "suppress_magnitude"
    needs = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Linears behind an online Hadamard that will be quantized."""
        for node in prog.nodes("linear"):
            x = operands(node)["input"]
            if "scheme" not in node.meta or kind(x) != "hadamard":
                continue
            if node.meta["scheme"].by_token:
                yield Miss(node.name, "a linear whose inputs are quantized by token keeps no channels apart", weight_of(node))
                continue
            if prog.fragment and prog.is_quantized(weight_of(node)):
                known = torch.tensor(prog.statistics["linears"][weight_of(node)]["outliers"], dtype=torch.long)  # type: ignore[index]
                if known.numel():
                    yield Site(node, known, 1.0)
                continue
            after = prog.value(weight_of(node)).double()
            factors = [prog.weights[str(f.target)].to(after) for f in x.args[1]]
            before = apply_factors(after, [f.t() for f in factors])
            peaks, limit = after.abs().amax(0), before.abs().max()
            if peaks.max() > limit:
                largest = peaks.argsort(descending=True, stable=True)[: self.rank]
                yield Site(node, largest.sort()[0], float(peaks.max() / limit))

    def rewrite(self, prog: Program, site: Site) -> None:
        """Note it on the node."""
        site.node.meta["outliers"] = site.outliers
