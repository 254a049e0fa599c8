"""Which nodes share memory that something writes to in place: what they hold depends on when they are read."""

from __future__ import annotations

from torch import fx

from mmqc.graph.kinds import kind, mutates
from mmqc.graph.program import Program

# Operations whose result may be a view of their first operand (some copy, when the strides ask for it).
MAY_VIEW = frozenset(
    (
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "ravel",
        "permute",
        "transpose",
        "t",
        "movedim",
        "contiguous",
        "detach",
        "expand",
        "expand_as",
        "broadcast_to",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "tensor_split",
        "getitem",
        "narrow",
        "select",
        "squeeze",
        "unsqueeze",
        "getattr:T",
        "getattr:mT",
        "getattr:data",
        "pixel_shuffle",
        "pixel_unshuffle",
        "to",
        "type",
        "type_as",
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "long",
        "bool",
        "alias",
        "identity",
        "dropout",
        "pad",
    )
)


def may_view(node: fx.Node) -> bool:
    """Whether the node's result may share memory with its first operand; a recording knows."""
    known = node.meta.get("view")
    return kind(node) in MAY_VIEW if known is None else known


def written(prog: Program) -> set[fx.Node]:
    """Nodes whose memory an in-place operation may reach: through views, from what they are views of and back."""
    found: set[fx.Node] = set()
    todo: list[fx.Node] = []
    for node in prog.graph.nodes:
        out = node.kwargs.get("out")
        todo += [n for n in (out if isinstance(out, tuple | list) else (out,)) if isinstance(n, fx.Node)]
        todo += [node, *node.all_input_nodes[:1]] if mutates(node) else []
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        todo += node.all_input_nodes[:1] if _shares(node) else []
        todo += [u for u in node.users if _shares(u) and u.all_input_nodes[0] is node]
    return found


def _shares(node: fx.Node) -> bool:
    return may_view(node) or mutates(node)
