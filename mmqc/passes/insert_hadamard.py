"""Put an online Hadamard transform in front of linears that read a non-linearity.

    W h = (W Hᵀ) (H h)

Shapes:  h [*, K]   W [N, K]   H [K, K] orthogonal, a Kronecker product of small factors
Why:     a non-linearity pins its channels, so outliers in front of down_proj and fc2 can only be spread at run time
         (QuaRot, arXiv:2404.00456, section 4; MQuant section 4.3).
Needs:   ops.raised
Gives:   nothing
Exact:   yes, up to reassociation (fp64 1e-12)
Refuses: a weight that something else reads too; one whose width has no equal blocks, where there are to be some.
Blocks:  I_t ⊗ H_{K/t} in the language model, so that t ranks that share its linears transform their own channels each.
Cost:    K (a1 + ... + ar) multiply-adds a row, where the ai are the factors' sizes; each site states it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from mmqc.graph.changes import Placed, Spread
from mmqc.graph.kinds import kind
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.spaces.spaces import Spaces
from mmqc.graph.spaces.towers import towers
from mmqc.graph.spaces.uses import RESCALED, rescaled
from mmqc.ops.hadamard_matrix import hadamard_cost, hadamard_factors, hadamard_kind


@dataclass(frozen=True)
class Site:
    """The linears that use one weight [N, K], and its width K."""

    linears: tuple[fx.Node, ...]
    fqn: str
    width: int
    outputs: int
    blocks: int = 1

    def __str__(self) -> str:
        online = hadamard_cost(self.width, self.blocks)
        share = online / (self.width * self.outputs)
        return f"{self.fqn}: {hadamard_kind(self.width, self.blocks)}, {online:,} multiply-adds a row ({share:.1%} of the linear's)"


@dataclass(frozen=True)
class InsertHadamard(Pass):
    """``everywhere`` takes in the linears that read a stream which cannot be rotated; ``blocks`` are the language model's."""

    everywhere: bool = False
    blocks: int = 1
    name = "insert_hadamard"
    needs = frozenset({"ops.raised"})

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Linears all of whose columns are written by an operation."""
        users: dict[str, list[fx.Node]] = {}
        for node in prog.nodes("linear"):
            users.setdefault(weight_of(node), []).append(node)
        places = towers(prog, Spaces.of(prog)) if self.blocks > 1 and prog.plan is None else {}
        for fqn, columns in self.candidates(prog, users).items():
            if fqn in prog.decided.hadamards:
                continue
            blocks = self.blocks if any(places.get(n) == "language" for n in users.get(fqn, ())) else 1
            blocks = blocks if prog.plan is None else prog.plan.blocks.get(fqn, 1)
            reason = self.why_not(prog, fqn, columns, users.get(fqn, []), blocks)
            if reason:
                node = users[fqn][0] if fqn in users else prog.nodes("get_attr")[0]
                yield Miss(node.name, reason, fqn)
            else:
                outputs, width = prog.weights[fqn].shape
                yield Site(tuple(users[fqn]), fqn, width, outputs, blocks)

    def candidates(self, prog: Program, users: Mapping[str, list[fx.Node]]) -> dict[str, int]:
        """Weights whose inputs should be spread, and how many of their columns ask for it."""
        if prog.plan is not None:
            planned = (f for f in users if f in prog.plan.hadamards and prog.is_quantized(f))
            return {fqn: prog.weights[fqn].shape[-1] for fqn in planned}
        if self.everywhere:
            heads = {t.fqn for space in Spaces.of(prog) if space.outputs for t in space.writers}
            still = (f for f in users if f and f not in heads and not prog.decided.rotated.get(f, {}).get(1))
            return {fqn: prog.weights[fqn].shape[-1] for fqn in still}
        made: dict[str, int] = {}
        for space in Spaces.of(prog):
            by_operation = any(s.what == "op" for s in space.made)
            for touch in space.readers if by_operation and not space.writers else ():
                if kind(touch.node) != "conv":
                    made[touch.fqn] = made.get(touch.fqn, 0) + touch.groups.numel()
        return made

    def why_not(self, prog: Program, fqn: str, columns: int, users: list[fx.Node], blocks: int) -> str:
        """The reason to refuse, or nothing."""
        width = prog.weights[fqn].shape[-1]
        if not users:
            return "no linear of its own reads with it, so an online transform has no place"
        if columns != width or width < 2:
            return "only some of its columns read an operation's result"
        if width % blocks or width == blocks:
            return f"its width of {width} has no {blocks} equal blocks, one for each rank of tensor_parallel"
        if not all(prog.hosted(n, "linear") for n in users):
            return "it is no nn.Linear module, so an online transform has no place"
        if fqn in rescaled(prog):
            return RESCALED
        if set(prog.users_of(fqn)) != set(users):
            return "something else reads its weight"
        return ""

    def rewrite(self, prog: Program, site: Site) -> None:
        """Insert the op, multiply its inverse into the weight."""
        factors = hadamard_factors(site.width, site.blocks)
        wide = torch.promote_types(prog.weights[site.fqn].dtype, torch.float32)
        prog.decided.hadamards.add(site.fqn)
        if site.blocks > 1:
            prog.decided.blocks[site.fqn] = site.blocks
        spread = Spread(site.width, factors, site.blocks)
        prog.derive(site.fqn, f"W Hᵀ, H = {hadamard_kind(site.width, site.blocks)}", Placed(1, None, spread), 1)
        name = f"hadamard_{site.width}" if site.blocks == 1 else f"hadamard_{site.blocks}x{site.width // site.blocks}"
        for linear in site.linears:
            x = operands(linear)["input"]
            with prog.graph.inserting_before(linear):
                nodes = [prog.constant_node(f"{name}_{i}", f.to(wide)) for i, f in enumerate(factors)]
                new = prog.graph.call_function(torch.ops.mmqc.hadamard.default, (x, nodes))
            copy_meta(new, linear, self.name, 0)
            linear.replace_input_with(x, new)
