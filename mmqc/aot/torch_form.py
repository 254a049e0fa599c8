"""An exported graph as Dynamo would have written it: the form in which the run-time passes know an operation.

    aten.slice.Tensor(x, 1, 0, 4)  ->  x[:, 0:4]        aten.mean.dim(x, [-1], True)  ->  x.mean([-1], True)

What no pass looks at stays as it is.  Gone are slices of everything, and checks of what a trace knows (a tensor's dtype, its
strides).  The graph runs as before; ``ExportedProgram.run_decompositions`` writes it in aten's ops again.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from mmqc.graph.sizes import EXAMPLE

METHODS = {  # of a tensor, with the same arguments
    *("add", "chunk", "clone", "contiguous", "cos", "div", "expand", "expand_as", "flatten", "index_select"),
    *("masked_fill", "masked_scatter", "matmul", "mean", "mul", "neg", "permute", "pow", "reciprocal", "relu"),
    *("repeat_interleave", "reshape", "rsqrt", "sigmoid", "sin", "split", "sqrt", "square", "squeeze", "sub", "sum"),
    *("tanh", "to", "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view"),
}
FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {  # and the number of arguments that models do not name
    "cat": (torch.cat, 2),
    "conv2d": (F.conv2d, 7),
    "conv3d": (F.conv3d, 7),
    "gelu": (F.gelu, 1),
    "layer_norm": (F.layer_norm, 5),
    "linear": (F.linear, 3),
    "rms_norm": (F.rms_norm, 4),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, 3),
    "silu": (F.silu, 1),
    "split_with_sizes": (torch.split, 2),
    "stack": (torch.stack, 2),
}
UNKNOWN = ("cudnn_enable",)  # to torch's function
CHECKS = ("_assert_tensor_metadata",)


def torch_form(graph: fx.Graph) -> fx.Graph:
    """A copy of an exported program's graph, before any decomposition."""
    new = fx.Graph()
    output = new.graph_copy(graph, {}, return_output_node=True)
    assert output is not None
    new.output(output[0])  # type: ignore[arg-type]
    for node in list(new.nodes):
        if "val" in node.meta:
            node.meta[EXAMPLE] = node.meta["val"]
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
            _rewrite(new, node, target)
    return new


def _rewrite(graph: fx.Graph, node: fx.Node, op: torch._ops.OpOverload) -> None:
    name = op._schema.name.removeprefix("aten::")
    args: list[Any] = list(node.args)
    if name in CHECKS:
        graph.erase_node(node)
    elif name in FUNCTIONS:
        node.target, some = FUNCTIONS[name]
        node.args, node.kwargs = tuple(args[:some]), {**_by_name(op, args, some), **node.kwargs}
    elif name == "select":
        node.target, node.args = operator.getitem, (args[0], (*_in_front(args[0], args[1]), args[2]))
    elif name == "slice":
        _rewrite_slice(graph, node, *args)
    elif _is_method(op, name) and isinstance(args[0], fx.Node):
        node.op, node.target = "call_method", name


def _is_method(op: torch._ops.OpOverload, name: str) -> bool:
    """Whether a tensor has a method of these arguments: ``to`` a dtype alone."""
    return name in METHODS and op._schema.arguments[0].name == "self" and (name != "to" or op._overloadname == "dtype")


def _by_name(op: torch._ops.OpOverload, args: list[Any], some: int) -> dict[str, Any]:
    """The arguments behind the first ``some``."""
    names = [a.name for a in op._schema.arguments]
    return {name: arg for name, arg in list(zip(names, args, strict=False))[some:] if name not in UNKNOWN}


def _rewrite_slice(graph: fx.Graph, node: fx.Node, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> None:
    end = None if end == sys.maxsize else end
    if not start and end is None and step == 1:
        node.replace_all_uses_with(x)
        graph.erase_node(node)
    else:
        node.target, node.args = operator.getitem, (x, (*_in_front(x, dim), slice(start, end, None if step == 1 else step)))


def _in_front(x: Any, dim: int) -> list[slice]:
    """Everything along the axes in front."""
    return [slice(None)] * (dim % x.meta["val"].dim())
