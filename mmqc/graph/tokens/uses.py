"""The vocabulary of token_rules.py: operations by how they treat tokens, and what a rule answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from mmqc.graph.kinds import kind

ATTENTION = "scaled_dot_product_attention"
# fmt: off
ELEMENTWISE = frozenset((
    "add", "sub", "rsub", "mul", "div", "rdiv", "pow", "rpow", "neg", "pos", "abs", "exp", "expm1", "log", "log1p", "sqrt",
    "rsqrt", "sin", "cos", "tanh", "sigmoid", "logsigmoid", "silu", "gelu", "relu", "relu6", "leaky_relu", "elu", "selu",
    "softplus", "softsign", "hardswish", "hardsigmoid", "hardtanh", "mish", "square", "reciprocal", "erf", "clamp", "clip",
    "minimum", "maximum", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bitwise_not", "logical_and", "logical_or", "logical_not", "logical_xor", "floor", "ceil",
    "round", "trunc", "sign", "addcmul", "addcdiv", "lerp", "floordiv", "mod", "remainder", "nan_to_num", "isnan", "isinf",
))
FIRST_ONLY = frozenset((
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool", "contiguous", "clone", "detach",
    "alias", "identity", "all_reduce", "wait_tensor",  # ranks that share a model have its tokens in one order
))
SHAPE_ONLY = frozenset((
    "size", "dim", "numel", "ndimension", "device", "getattr:device", "getattr:dtype", "getattr:shape", "getattr:ndim",
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
    "is_floating_point", "stride",
))
RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"))
OURS = frozenset(("weight_only_matmul", "float4_matmul", "hadamard", "rotate", "quantize_per_token"))  # of mmqc: rows in, rows out
# fmt: on


@dataclass(frozen=True)
class Use:
    """An operand that has to be in the new order along ``axis``, after leading axes of size 1 were added up to ``rank``."""

    axis: int
    rank: int


Uses = dict[fx.Node, Use]


def named(node: fx.Node, *names: str) -> dict[str, Any]:
    """Operands by parameter name."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def is_ours_or_torchs(node: fx.Node) -> bool:
    """Whether the name of the operation means what it says: other libraries' operations are unknown."""
    if node.op == "call_method":
        return True
    space = getattr(node.target, "namespace", None)
    space = space or str(getattr(node.target, "_qualified_op_name", "")).partition("::")[0]
    if space:
        return space in ("aten", "prims", "mmqc", "_c10d_functional")
    module = getattr(node.target, "__module__", None) or "torch"
    return module.partition(".")[0] in ("torch", "_operator", "operator", "builtins", "math", "mmqc")


def is_attention(node: fx.Node) -> bool:
    """Whether it is torch's attention: an attention of another library takes other operands."""
    return kind(node) == ATTENTION and is_ours_or_torchs(node)


def attention(node: fx.Node) -> dict[str, Any]:
    """The operands of an attention call by name."""
    return named(node, "query", "key", "value", "attn_mask", "dropout_p", "is_causal")
