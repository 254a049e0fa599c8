"""Quantize linears with dynamic activations: weights by a solver, inputs by token, both in one to three precisions.

    linear(x, W, b)  ->  mixed_matmul(quantize_per_token(x, order, K_p, bits), W_q, s_W, c, b)

Shapes:  x [*, K]   W [N, K]   W_q one int8 or packed [N, K_p] a part   s_W, c [N, P]
         order int64 [K], or none if it is the channels' own
Why:     the high part's few channels hold most of the energy (ResQ, arXiv:2412.14363, section 4).
Needs:   ops.raised
Gives:   nothing
Exact:   no: |x - (s q + o)| <= s / 2 per element of a part, and weights as quantize_weights has them
Refuses: nothing; a linear that nobody told its high channels has one part, of the low bits.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.config import Scheme
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.ops.pack import pack, stored_bits
from mmqc.solvers.mixed import MixedQuantized, Part, parts_of, solve

HIGH, LOWEST = "high", "lowest"  # meta: int64 indices of a linear's channels in the high, and in a third part


@dataclass(frozen=True)
class Site:
    """One weight, the linear nodes that use it, and the parts of its channels."""

    fqn: str
    nodes: tuple[fx.Node, ...]
    scheme: Scheme
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        widths = " + ".join(f"{len(p.columns)} at W{p.bits}" for p in self.parts)
        return f"{self.fqn}: {self.scheme}, {widths}, by {self.scheme.weight.solver}"


@dataclass(frozen=True)
class QuantizeMixed(Pass):
    """The fields are those of ``QuantizeWeights``."""

    hessian: Callable[[str], Tensor | None] = field(default=lambda fqn: None, compare=False)
    aim: Callable[[str, Tensor, Tensor | None], Tensor] = field(default=lambda fqn, weight, hessian: weight, compare=False)
    done: Callable[[str, MixedQuantized, float, float], Any] = field(default=lambda *a: None, compare=False)
    cache: dict[Any, Any] = field(default_factory=dict, compare=False)
    name = "quantize_mixed"
    needs = frozenset({"ops.raised"})
    exact = False

    def match(self, prog: Program) -> Iterator[Site]:
        """Linears with a dynamic scheme, by weight."""
        by_weight: dict[str, list[fx.Node]] = {}
        for node in prog.nodes("linear"):
            if "scheme" in node.meta and node.meta["scheme"].dynamic is not None:
                by_weight.setdefault(weight_of(node), []).append(node)
        for fqn, nodes in by_weight.items():
            scheme = nodes[0].meta["scheme"]
            high = nodes[0].meta.get(HIGH) if scheme.dynamic.high_fraction else None
            lowest = nodes[0].meta.get(LOWEST) if scheme.dynamic.lowest_fraction else None
            parts = parts_of(
                prog.weights[fqn].shape[1], high, scheme.weight.bits, scheme.dynamic.high_bits, lowest, scheme.dynamic.lowest_bits
            )
            yield Site(fqn, tuple(nodes), scheme, parts)

    def rewrite(self, prog: Program, site: Site) -> None:
        """Solve, add the parts as weights of their own, replace the nodes."""
        start = time.perf_counter()
        value = prog.value(site.fqn)
        wide = value if value.dtype == torch.float64 else value.float()
        solved = self.solution(prog, site)
        size = wide.norm()
        error = float((wide - solved.dequantize().to(wide)).norm() / size) if size else math.nan
        self.done(site.fqn, solved, error, time.perf_counter() - start)
        prog.solved[site.fqn] = solved
        stored = Stored.of(solved, site.scheme)
        for name, tensor in stored.tensors().items():
            prog.add_weight(f"{site.fqn}.{name}", tensor)
        for node in site.nodes:
            self.replace(prog, site, node, stored)

    def solution(self, prog: Program, site: Site) -> MixedQuantized:
        """The rounded weight of a site: solved, or found in the cache."""
        key = (site.fqn, tuple(step.formula for step in prog.derived(site.fqn)))
        if key not in self.cache:
            value = prog.value(site.fqn)
            wide = value if value.dtype == torch.float64 else value.float()
            hessian = self.hessian(site.fqn)
            aimed = self.aim(site.fqn, wide, hessian)
            self.cache[key] = solve(aimed, site.parts, site.scheme.weight, hessian, name=site.fqn)
        return self.cache[key]

    def replace(self, prog: Program, site: Site, node: fx.Node, stored: Stored) -> None:
        """Put quantize_per_token and mixed_matmul in a linear's place."""
        named, call = operands(node), prog.graph.call_function

        def weight(name: str) -> fx.Node:
            return prog.constant_node(f"{site.fqn}.{name}", prog.weights[f"{site.fqn}.{name}"])

        with prog.graph.inserting_before(node):
            order = None if stored.order is None else weight("order")
            bits = [*stored.activation_bits]
            both = call(torch.ops.mmqc.quantize_per_token.default, (named["input"], order, [*stored.widths], bits))
            x_q, s_x, o_x = (call(operator.getitem, (both, i)) for i in range(3))
            w_q = [weight(f"codes_{p}") for p in range(len(stored.widths))]
            new = call(
                torch.ops.mmqc.mixed_matmul.default,
                (
                    x_q,
                    s_x,
                    o_x,
                    w_q,
                    weight("scale"),
                    weight("sum"),
                    named["bias"],
                    [*stored.widths],
                    [*stored.bits],
                    prog.weights[site.fqn].dtype,
                ),
            )
        for made in (both, x_q, s_x, o_x, new):
            copy_meta(made, node, self.name, 0)
        new.meta.update({k: node.meta[k] for k in ("tower", "role", "scheme")}, fqn=site.fqn)
        node.replace_all_uses_with(new)


@dataclass(frozen=True, eq=False)
class Stored:
    """A solved weight as the ops take it: codes part after part, packed where they fit 4 bits and the scheme wants it.

    Attributes:
        codes: one int8 [N, K_p] or packed uint8 a part.
        scale, sum: float32 and int32 [N, P].
        order: int64 [K], the channels part after part; None where that is their own order.
        widths, bits, activation_bits: one entry a part: channels, stored bits of a weight, bits of an activation.
    """

    codes: tuple[Tensor, ...]
    scale: Tensor
    sum: Tensor
    order: Tensor | None
    widths: tuple[int, ...]
    bits: tuple[int, ...]
    activation_bits: tuple[int, ...]

    @classmethod
    def of(cls, solved: MixedQuantized, scheme: Scheme) -> Stored:
        """Take the codes apart."""
        assert scheme.dynamic is not None
        columns = [part.columns.to(solved.codes.device) for part in solved.parts]
        codes = [solved.codes[:, c] for c in columns]
        bits = tuple(stored_bits(part.bits, True) if scheme.dynamic.packed else 8 for part in solved.parts)
        order = torch.cat(columns)
        own = torch.equal(order, torch.arange(len(order), device=order.device))
        return cls(
            tuple(c.contiguous() if b == 8 else pack(c, b) for c, b in zip(codes, bits, strict=True)),
            solved.scale,
            torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1),
            None if own else order,
            tuple(map(len, columns)),
            bits,
            ((scheme.dynamic.lowest_bits,) if len(columns) == 3 else ())
            + (scheme.dynamic.bits, scheme.dynamic.high_bits)[: len(columns)],
        )

    def tensors(self) -> dict[str, Tensor]:
        """By the names that they get behind the weight's."""
        named = {f"codes_{p}": c for p, c in enumerate(self.codes)} | {"scale": self.scale, "sum": self.sum}
        return named if self.order is None else {**named, "order": self.order}
