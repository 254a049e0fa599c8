"""Quantize linears' inputs: with static scales, one per tensor or one per tensor and modality (MSQ), or token by token.

    weight_only_matmul(x, W_q, s_W, b, g)  ->  scaled_matmul(quantize(x, s_x), W_q, s_x, s_W, b, t, g)
    or, by token             ->  token_matmul(x, W_q, s_W, b, g)
    row r of x uses s_x[visual[r]]: s_text or s_visual      (MQuant, arXiv:2502.00425, section 4.1)

Shapes:  x [*, K]   s_x [1] or [2] = (text, visual)   visual bool [*]   t int32 [N, ceil(K/g)], integer group scales, or None
Needs:   linears.quantized
Gives:   nothing
Exact:   no: |x - s_x x_q| <= s_x / 2 per element inside the range
Refuses: a linear for which calibration saw no input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.sizes import sizes
from mmqc.ops.pack import FLOAT8


@dataclass(frozen=True)
class Site:
    """One integer matmul and its input scales."""

    node: fx.Node
    scale: Tensor | None  # None: found token by token

    def __str__(self) -> str:
        if self.scale is None:
            return f"{self.node.meta['fqn']}: a scale per token"
        return f"{self.node.meta['fqn']}: s = {', '.join(f'{s:.3g}' for s in self.scale.tolist())}"


@dataclass(frozen=True)
class QuantizeActivations(Pass):
    name = "quantize_activations"
    needs = frozenset({"linears.quantized"})
    exact = False

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Integer weights whose scheme quantizes activations too."""
        known = prog.statistics["linears"] if prog.statistics is not None else {}
        for node in prog.graph.nodes:
            if kind(node) == "weight_only_matmul" and node.meta["scheme"].by_token:
                yield Site(node, None)
            elif kind(node) == "weight_only_matmul" and node.meta["scheme"].activation is not None:
                scale = known.get(node.meta["fqn"], {}).get("input_scale")
                if scale is None:
                    yield Miss(node.name, "calibration saw no input of it, so it has no static scale", node.meta["fqn"])
                else:
                    yield Site(node, torch.tensor(scale, dtype=torch.float32))

    def rewrite(self, prog: Program, site: Site) -> None:
        """Replace the node by quantize and scaled_matmul, or by token_matmul."""
        if site.scale is None:
            self.by_token(prog, site.node)
            return
        x, codes, scale, bias, bits, group = site.node.args[:6]
        fqn, spec = site.node.meta["fqn"], site.node.meta["scheme"].activation
        visual = prog.visual_node() if site.scale.numel() == 2 else None
        with prog.graph.inserting_before(site.node):
            if visual is not None and _rank(x) == 2:  # [B L, K]: experts and routers flatten their tokens
                visual = prog.graph.call_method("reshape", (visual, -1))
            s_x = prog.constant_node(f"{fqn}.input_scale", site.scale.to(prog.weights[fqn].device))
            scale, group_scale = self.weight_scales(prog, fqn, scale)
            grouped = (group_scale, group) if group else ()
            code = (FLOAT8,) if site.node.meta["scheme"].float8 else ()
            quantized = prog.graph.call_function(torch.ops.mmqc.quantize.default, (x, s_x, visual, spec.bits, *code))
            new = prog.graph.call_function(
                torch.ops.mmqc.scaled_matmul.default,
                (quantized, codes, s_x, scale, bias, visual, bits, prog.weights[fqn].dtype, *grouped),
            )
        for made in (quantized, new):
            copy_meta(made, site.node, self.name, 0)
        new.meta.update({k: site.node.meta[k] for k in ("tower", "role", "scheme", "fqn")})
        site.node.replace_all_uses_with(new)

    def by_token(self, prog: Program, node: fx.Node) -> None:
        """Replace the node by token_matmul."""
        code = (FLOAT8,) if node.meta["scheme"].float8 else ()
        with prog.graph.inserting_before(node):
            new = prog.graph.call_function(torch.ops.mmqc.token_matmul.default, (*node.args[:6], *code))
        copy_meta(new, node, self.name, 0)
        new.meta.update({k: node.meta[k] for k in ("tower", "role", "scheme", "fqn")})
        node.replace_all_uses_with(new)

    def weight_scales(self, prog: Program, fqn: str, scale: Any) -> tuple[Any, fx.Node | None]:
        """The weight's scales as they are, or where they are integers the two factors that they are made of."""
        solved = prog.solved.get(fqn)  # a result that is done with may be gone; its scales are floats then
        if solved is None or not solved.integer:
            return scale, None
        integer, channel = solved.integer_scales()
        return prog.constant_node(f"{fqn}.channel_scale", channel), prog.constant_node(f"{fqn}.group_scale", integer)


def _rank(x: object) -> int:
    """Number of axes of an activation: that of the nearest node behind it whose shape was captured."""
    node = x if isinstance(x, fx.Node) else None
    while node is not None:
        size = sizes(node)
        if size is not None:
            return len(size)
        node = next((n for n in node.all_input_nodes if n.op != "get_attr"), None)
    return 0
