"""Nodes that multiply by a stored weight: which of its axes they read and write, and the bias they may have to be given.

    linear(x, W)    matmul(x, W.T)    linear(x, W[e])    bmm(x, W)    conv2d(x, W)

The weight may be reached through transposes, casts, and the choice of an expert from stacked ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Program

_WEIGHT_OPERAND = {"linear": 1, "conv": 1, "matmul": 1, "grouped_mm": 1, "_grouped_mm": 1}
_PASS_ON = frozenset(("to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "detach", "clone"))


@dataclass(frozen=True)
class Contraction:
    """A node that contracts the channels of ``x`` with an axis of a stored weight.

    Attributes:
        x: its input.
        fqn: the weight.
        reads: axis of the weight that meets the channels of x.
        writes: axis of the weight that the channels of the result come from.
        channel: axis of x and of the result that holds the channels.
        chain: nodes between the stored weight and this node, the weight's ``get_attr`` included.
    """

    x: fx.Node
    fqn: str
    reads: int
    writes: int
    channel: int
    chain: tuple[fx.Node, ...]

    @property
    def whole(self) -> bool:
        """Whether it is a plain linear or convolution with all of its weight."""
        return len(self.chain) == 1


def contraction(prog: Program, node: fx.Node) -> Contraction | None:
    """How a node multiplies by a stored weight; None if it does not."""
    word = kind(node)
    if word not in _WEIGHT_OPERAND or (word == "conv" and not _is_plain_conv(node)):
        return None
    named = operands(node)
    x, weight = named.get("input"), named.get("weight")
    stored = _stored(prog, weight)
    if stored is None or not isinstance(x, fx.Node):
        return None
    fqn, axes, chain = stored
    if len(axes) < 2:
        return None
    if word == "conv":
        reads, writes, channel = axes[1], axes[0], 1 - len(axes)
    else:
        reads, writes, channel = *((axes[-1], axes[-2]) if word == "linear" else (axes[-2], axes[-1])), -1
    return None if reads is None or writes is None else Contraction(x, fqn, reads, writes, channel, chain)


def _is_plain_conv(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    groups = node.kwargs.get("groups", node.args[6] if len(node.args) > 6 else 1)
    return isinstance(groups, int) and groups == 1 and "transpose" not in name


def _stored(prog: Program, node: Any) -> tuple[str, list[int | None], tuple[fx.Node, ...]] | None:
    """The weight behind an operand, which of its axes each axis of the operand is, and the nodes on the way."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "get_attr":
        return str(node.target), list(range(prog.weights[str(node.target)].dim())), (node,)
    behind = _stored(prog, node.args[0]) if node.op in ("call_method", "call_function") and node.args else None
    if behind is None:
        return None
    fqn, axes, chain = behind
    new = _reordered(node, axes)
    return None if new is None else (fqn, new, (*chain, node))


def _reordered(node: fx.Node, axes: list[int | None]) -> list[int | None] | None:
    word, rest = kind(node), node.args[1:]
    if word in _PASS_ON:
        return axes
    if word in ("t", "getattr:T"):
        return axes[::-1]
    if word in ("getattr:mT", "transpose"):
        a, b = (-1, -2) if word == "getattr:mT" else rest if len(rest) == 2 else (None, None)
        if not (isinstance(a, int) and isinstance(b, int)):
            return None
        swapped = list(axes)
        swapped[a], swapped[b] = axes[b], axes[a]
        return swapped
    if word in ("getitem", "select") and len(axes) > 2:  # one expert of several
        index = rest[-1]
        if (word == "select" and rest[0] != 0) or not isinstance(index, int | fx.Node):
            return None
        return axes[1:] if _rank(node) == len(axes) - 1 else None
    return None


def _rank(node: fx.Node) -> int:
    example = node.meta.get("example_value")
    return example.dim() if isinstance(example, Tensor) else len(node.meta.get("shape", ()))


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
