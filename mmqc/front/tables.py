"""Sines and cosines of rotary tables as torch's own kernels compute them, whatever compiles the rest of the graph.

Why:   Inductor's cos differs from torch's in the last bit in every third entry.  That is nothing to a float model, but q and k are
       made of it: every attention output moves by a bit, and where the next linear quantizes it, some code falls on the other side
       of a tie.  One flipped code is a difference of 1e-2 (explanation/numerics.md).  With torch's kernels a quantized model
       compiles to what it is in eager mode.
Cost:  none to speak of: the tables are small and computed once per call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind

NAMES = ("cos", "sin")


def _define(name: str) -> None:
    op = f"mmqc_front::{name}"
    torch.library.define(op, "(Tensor x) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(op, "CompositeExplicitAutograd", getattr(torch, name))
    torch.library.register_fake(op, torch.empty_like)


for _name in NAMES:
    _define(_name)


def keep_tables(gm: fx.GraphModule) -> int:
    """Let torch compute the sines and cosines of a graph of Dynamo; how many there were."""
    found = [n for n in gm.graph.nodes if kind(n) in NAMES and _is_constant(n)]
    for node in found:
        node.target = getattr(torch.ops.mmqc_front, kind(node)).default
        node.op, node.kwargs = "call_function", {}
    if found:
        gm.recompile()
    return len(found)


def _is_constant(node: fx.Node) -> bool:
    """Whether no gradient goes through the node."""
    example: Any = node.meta.get("example_value")
    return len(node.args) == 1 and not (isinstance(example, Tensor) and example.requires_grad)
