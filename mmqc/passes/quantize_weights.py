"""Round weights to integers, or to floats of 4 bits, with the scheme's solver.

    linear(x, W, b)  ->  weight_only_matmul(x, W_q, s_W, b[, z_W]) [+ W[:, S] x[S]]
                         float4_matmul(x, W_q, s_W, d, b)          [+ W[:, S] x[S]]     where weights are floats of 4 bits

Shapes:  x [*, K]   W [N, K]   W_q int8 [N, K] or packed uint8 [N, packed_width]   s_W, z_W [N] or [N, ceil(K/g)]
         z_W int8 or float16
Needs:   ops.raised
Gives:   linears.quantized
Exact:   no: |W - s_W W_q| <= s_W / 2 per element inside the range, for round-to-nearest (floats: half a step of e2m1's)
Refuses: nothing; where a group size does not divide K, the last group is short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.config import Scheme
from mmqc.graph.linear import operands, weight_of
from mmqc.graph.program import Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.ops.float4 import pack_float4
from mmqc.ops.pack import pack, stored_bits
from mmqc.solvers import Quantized, solve


@dataclass(frozen=True)
class Site:
    """One weight and the linear nodes that use it."""

    fqn: str
    nodes: tuple[fx.Node, ...]
    scheme: Scheme

    def __str__(self) -> str:
        return f"{self.fqn}: {self.scheme} by {self.scheme.weight.solver}"


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """Where second moments come from and results go.

    Attributes:
        hessian: second moment of a linear's inputs by weight FQN, float64 [K, K]; called when its turn comes, and
            used up.
        aim: what a solver is given of (FQN, weight, hessian): the weight, or one that makes up for the blocks in front of it.
        done: called with (FQN, result, weight error, seconds) after each weight.
        cache: results by FQN and formulas, for weights that several graphs share.
    """

    hessian: Callable[[str], Tensor | None] = field(default=lambda fqn: None, compare=False)
    aim: Callable[[str, Tensor, Tensor | None], Tensor] = field(default=lambda fqn, weight, hessian: weight, compare=False)
    done: Callable[[str, Quantized, float, float], Any] = field(default=lambda *a: None, compare=False)
    cache: dict[Any, Quantized] = field(default_factory=dict, compare=False)
    name = "quantize_weights"
    needs = frozenset({"ops.raised"})
    gives = frozenset({"linears.quantized"})
    exact = False

    def match(self, prog: Program) -> Iterator[Site]:
        """Linears with a scheme, by weight."""
        by_weight: dict[str, list[fx.Node]] = {}
        for node in prog.nodes("linear"):
            if "scheme" in node.meta and node.meta["scheme"].dynamic is None:
                by_weight.setdefault(weight_of(node), []).append(node)
        for fqn, nodes in by_weight.items():
            yield Site(fqn, tuple(nodes), nodes[0].meta["scheme"])

    def rewrite(self, prog: Program, site: Site) -> None:
        """Solve, add the parts as weights of their own, replace the nodes."""
        start = time.perf_counter()
        spec = site.scheme.weight
        outliers = site.nodes[0].meta.get("outliers")
        value = prog.value(site.fqn)
        solved = self.solution(prog, site)
        self.done(site.fqn, solved, relative_error(value, solved, outliers), time.perf_counter() - start)
        prog.solved[site.fqn] = solved
        if spec.amplifier is not None and not solved.integer:
            prog.notes.append(f"{site.fqn}: {solved.note}")
        bits = stored_bits(spec.bits, site.scheme.activation is not None)
        parts = stored_parts(solved, bits)
        for part, tensor in parts.items():
            prog.add_weight(f"{site.fqn}.{part}", tensor)
        for node in site.nodes:
            named = operands(node)
            with prog.graph.inserting_before(node):
                codes, scale, *more = (prog.constant_node(f"{site.fqn}.{p}", prog.weights[f"{site.fqn}.{p}"]) for p in parts)
                if spec.float4:
                    divisor = more[0] if more else None
                    args = (named["input"], codes, scale, divisor, named["bias"], spec.type)
                    new = prog.graph.call_function(torch.ops.mmqc.float4_matmul.default, args)
                else:
                    args = (named["input"], codes, scale, named["bias"], bits, spec.group_size, *more)
                    new = prog.graph.call_function(torch.ops.mmqc.weight_only_matmul.default, args)
                total = self.with_outliers(prog, new, named["input"], site.fqn, value, outliers)
            copy_meta(new, node, self.name, 0)
            new.meta.update({k: node.meta[k] for k in ("tower", "role", "scheme")}, fqn=site.fqn)
            node.replace_all_uses_with(total)

    def solution(self, prog: Program, site: Site) -> Quantized:
        """The rounded weight of a site: solved, or found in the cache."""
        key = (site.fqn, tuple(step.formula for step in prog.derived(site.fqn)))
        if key not in self.cache:
            spec, value, outliers = site.scheme.weight, prog.value(site.fqn).float(), site.nodes[0].meta.get("outliers")
            if spec.type == "float" and not site.scheme.by_token and not self.has_input_scale(prog, site.fqn):
                spec = replace(spec, type="int")  # beside floating-point inputs, which float8 codes have no kernel for
            hessian = self.hessian(site.fqn)
            aimed = self.aim(site.fqn, value, hessian)
            self.cache[key] = solve(aimed, spec, hessian, skip=outliers, name=site.fqn, overwrite=True)
        return self.cache[key]

    def has_input_scale(self, prog: Program, fqn: str) -> bool:
        """Whether calibration saw the linear's input."""
        known = prog.statistics["linears"] if prog.statistics is not None else {}
        return known.get(fqn, {}).get("input_scale") is not None

    def with_outliers(self, prog: Program, y: fx.Node, x: fx.Node, fqn: str, value: Tensor, outliers: Tensor | None) -> fx.Node:
        """Y + W[:, S] x[S]."""
        if outliers is None:
            return y
        index = prog.constant_node(f"{fqn}.outliers", outliers)
        columns = prog.constant_node(f"{fqn}.outlier_weight", value[:, outliers].contiguous())
        picked = prog.graph.call_method("index_select", (x, -1, index))
        return prog.graph.call_method("add", (y, prog.graph.call_function(torch.nn.functional.linear, (picked, columns))))


def stored_parts(solved: Quantized, bits: int) -> dict[str, Tensor]:
    """Codes, scales and what else a weight's op reads, as they are stored."""
    if solved.form:
        parts = {"codes": pack_float4(solved.codes), "scale": solved.stored_scale()}
        return parts if solved.divisor is None else parts | {"divisor": solved.divisor}
    parts = {"codes": solved.codes if bits == 8 else pack(solved.codes, bits), "scale": solved.scale}
    return parts if solved.zero is None else parts | {"zero": solved.zero}


def relative_error(value: Tensor, solved: Quantized, outliers: Tensor | None) -> float:
    """|Q - W| / |W| without the columns ``outliers``; NaN for W = 0."""
    difference = value.float() - solved.dequantize()
    if outliers is not None:
        difference[:, outliers] = 0
    size = value.float().norm()
    return float(difference.norm() / size) if size else math.nan
