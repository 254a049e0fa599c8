"""At compile time: linears whose weight torchao quantized to int8 become ``weight_only_matmul`` on the weight's own parts.

    linear(x, W, b)  ->  weight_only_matmul(x, W.qdata, W.scale, b)        W an Int8Tensor, weight-only, symmetric

Exact:   up to the order of the sums; the weight is dequantized by the same product
Refuses: other torchao tensors, which keep torchao's arithmetic: that is lowered by Inductor as ever
What the model holds is not touched; ``adopt_torchao_`` (mmqc/checkpoint/torchao_weights.py) does that, for more kinds of weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.linear import operands
from mmqc.graph.program import Miss, PassRecord, copy_meta

NAME = "adopt_torchao"


def adopt_torchao(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> PassRecord | None:
    """Rewrites Dynamo's graph in place.

    Returns:
        What was done; None for a graph without weights of torchao's.
    """
    started = time.perf_counter()
    holders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    theirs = {n: v.data for n, v in zip(holders, example_inputs, strict=True) if _is_torchao(v)}
    if not theirs:
        return None
    record = PassRecord(NAME, exact=True)
    for node in [n for n in gm.graph.nodes if kind(n) == "linear" and operands(n)["weight"] in theirs]:
        reason = _why_not(theirs[operands(node)["weight"]])
        if reason:
            record.misses.append(Miss(node.name, reason))
        else:
            record.sites.append(f"{node.name}: {operands(node)['weight'].name}")
            _replace(gm.graph, node, len(record.sites))
    if record.sites:
        gm.graph.lint()
        gm.recompile()
    record.ms = 1e3 * (time.perf_counter() - started)
    return record


def _is_torchao(value: Any) -> bool:
    return isinstance(value, Tensor) and type(value.data).__module__.startswith("torchao.")


def _why_not(weight: Any) -> str:
    """The reason to leave a weight to torchao, or nothing."""
    if type(weight).__name__ != "Int8Tensor":
        return f"torchao's {type(weight).__name__} keeps torchao's arithmetic"
    from mmqc.checkpoint.torchao_weights import int8_parts  # torchao's types are loaded when a weight is there

    parts = int8_parts(weight)
    return parts if isinstance(parts, str) else ""


def _replace(graph: fx.Graph, node: fx.Node, site: int) -> None:
    own = operands(node)
    with graph.inserting_before(node):
        codes = graph.call_function(getattr, (own["weight"], "qdata"))
        scale = graph.call_function(getattr, (own["weight"], "scale"))
        rows = graph.call_method("reshape", (scale, -1))
        wide = graph.call_method("float", (rows,))
        op = torch.ops.mmqc.weight_only_matmul.default
        new = graph.call_function(op, (own["input"], codes, wide, own["bias"], 8, 0))
    for made in (codes, scale, rows, wide, new):
        copy_meta(made, node, NAME, site)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
