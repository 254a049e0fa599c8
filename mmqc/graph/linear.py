"""Linear nodes: their operands, and the bias that a pass may have to give them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .kinds import kind
from .program import Program


def operands(node: fx.Node) -> dict[str, Any]:
    """input, weight and bias of a ``linear`` (or of a convolution)."""
    return {"bias": None} | dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)


def weight_of(node: fx.Node) -> str:
    """FQN of the weight, or nothing if it is computed."""
    weight = operands(node)["weight"]
    return str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""


def bias_of(prog: Program, node: fx.Node) -> str:
    """FQN of the bias, or nothing."""
    bias = operands(node).get("bias") if kind(node) in ("linear", "conv") else None
    return str(bias.target) if isinstance(bias, fx.Node) and bias.op == "get_attr" else ""


def set_bias(prog: Program, node: fx.Node) -> str:
    """Give every linear that uses this weight a zero bias of its own; returns the bias's name."""
    weight = weight_of(node)
    name = f"{weight.removesuffix('weight')}bias"
    tensor: Tensor = prog.weights[weight]
    prog.add_weight(name, torch.zeros(tensor.shape[0], dtype=tensor.dtype, device=tensor.device))
    for other in prog.nodes("linear"):
        if weight_of(other) == weight:
            with prog.graph.inserting_before(other):
                bias = prog.graph.get_attr(name)
            named = operands(other)
            other.args, other.kwargs = (named["input"], named["weight"], bias), {}
    return name
