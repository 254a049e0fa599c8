"""Put an online Hadamard transform in front of linears that read a non-linearity.

    W h = (W Hᵀ) (H h)

Shapes:  h [*, K]   W [N, K]   H [K, K] orthogonal, a Kronecker product of small factors
Why:     a non-linearity pins its channels, so outliers in front of down_proj and fc2 can only be spread at run time
         (QuaRot, arXiv:2404.00456, section 4; MQuant section 4.3).
Needs:   ops.raised
Gives:   nothing
Exact:   yes, up to reassociation (fp64 1e-12)
Refuses: a weight that something else reads too.
Cost:    K (a1 + ... + ar) multiply-adds a row, where the ai are the factors' sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from ..graph.linear import operands, weight_of
from ..graph.program import Miss, Program, copy_meta
from ..graph.spaces import Spaces
from ..ops.hadamard_matrix import hadamard_factors, hadamard_kind


@dataclass(frozen=True)
class Site:
    """The linears that use one weight, and its width."""

    linears: tuple[fx.Node, ...]
    fqn: str
    width: int

    def __str__(self) -> str:
        return f"{self.fqn}: {hadamard_kind(self.width)}"


@dataclass(frozen=True)
class InsertHadamard:
    """See the module's docstring."""

    name: ClassVar[str] = "insert_hadamard"
    needs: ClassVar[frozenset[str]] = frozenset({"ops.raised"})
    gives: ClassVar[frozenset[str]] = frozenset()
    exact: ClassVar[bool] = True

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Linears all of whose columns are written by an operation."""
        made: dict[str, int] = {}
        for space in Spaces.of(prog):
            by_operation = any(s.what == "op" for s in space.made)
            for touch in space.readers if by_operation and not space.writers else ():
                made[touch.fqn] = made.get(touch.fqn, 0) + touch.groups.numel()
        users: dict[str, list[fx.Node]] = {}
        for node in prog.nodes("linear"):
            users.setdefault(weight_of(node), []).append(node)
        if prog.plan is not None:
            made = {
                fqn: prog.weights[fqn].shape[-1]
                for fqn in users
                if fqn in prog.plan.hadamards and prog.is_quantized(fqn)
            }
        for fqn, columns in made.items():
            width = prog.weights[fqn].shape[-1]
            getter = next(n for n in prog.nodes("get_attr") if n.target == fqn)
            if fqn in prog.decided.hadamards:
                continue
            if columns != width or width < 2:
                yield Miss(users[fqn][0].name, "only some of its columns read an operation's result", fqn)
            elif not all(prog.hosted(n, "linear") for n in users[fqn]):
                yield Miss(users[fqn][0].name, "it is no nn.Linear module, so an online transform has no place", fqn)
            elif set(getter.users) != set(users[fqn]):
                yield Miss(users[fqn][0].name, "something else reads its weight", fqn)
            else:
                yield Site(tuple(users[fqn]), fqn, width)

    def rewrite(self, prog: Program, site: Site) -> None:
        """Insert the op, multiply its inverse into the weight."""
        factors = hadamard_factors(site.width)
        h = factors[0]
        for factor in factors[1:]:
            h = torch.kron(h, factor)
        wide = torch.promote_types(prog.weights[site.fqn].dtype, torch.float32)
        prog.decided.hadamards.add(site.fqn)
        prog.derive(site.fqn, f"W Hᵀ, H = {hadamard_kind(site.width)}", _AfterHadamard(h))
        for linear in site.linears:
            x = operands(linear)["input"]
            with prog.graph.inserting_before(linear):
                nodes = [prog.constant_node(f"hadamard_{site.width}_{i}", f.to(wide)) for i, f in enumerate(factors)]
                new = prog.graph.call_function(torch.ops.mmqc.hadamard.default, (x, nodes))
            copy_meta(new, linear, self.name, 0)
            linear.replace_input_with(x, new)


@dataclass(frozen=True)
class _AfterHadamard:
    h: Tensor

    def __call__(self, w: Tensor) -> Tensor:
        return w @ self.h.t().to(w)
