"""What a Dynamo graph holds: the mmqc ops in it, and whether it does any work worth a compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import fx

HEAVY = frozenset(
    (
        "linear",
        "bilinear",
        "matmul",
        "__matmul__",
        "bmm",
        "mm",
        "mv",
        "addmm",
        "baddbmm",
        "addbmm",
        "einsum",
        "tensordot",
        "inner",
        "chain_matmul",
        "multi_dot",
        "_grouped_mm",
        "grouped_mm",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "embedding",
        "embedding_bag",
        "convolution",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "conv_tbc",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
    )
)
KNOWN_NAMESPACES = ("aten", "prims", "mmqc")


def calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Every call in the graph and in the graphs nested in it."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from (n for n in module.graph.nodes if n.op.startswith("call_"))


def op_name(target: object) -> tuple[str, str]:
    """(namespace, name) of a call's target; the namespace is empty for anything but a dispatcher op."""
    if isinstance(target, str):
        return "", target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace, target._schema.name.split("::")[-1]
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, name = target._qualified_op_name.split("::")
        return namespace, name
    return "", getattr(target, "__name__", type(target).__name__)


def mmqc_ops(gm: fx.GraphModule) -> Counter[str]:
    """Counts of the mmqc ops."""
    names = (op_name(n.target) for n in calls(gm))
    return Counter(name for namespace, name in names if namespace == "mmqc")


def has_heavy_op(gm: fx.GraphModule) -> bool:
    """Whether anything in the graph is worth compiling: matrix products, lookups, foreign ops, nested control flow."""
    for node in calls(gm):
        if node.op == "call_module":
            return True
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return True
        namespace, name = op_name(node.target)
        if name in HEAVY or (namespace and namespace not in KNOWN_NAMESPACES):
            return True
    return False
