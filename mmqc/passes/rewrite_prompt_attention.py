"""Causal attention of a prompt is the variable-length attention of one sequence, which knows any length at once.

    sdpa(q [1, H, T, D], k, v [1, H_kv, T, D], is_causal)  ->  scaled_dot_product_attention(q, k, v, ends, ends, ..)   ends = (0, T)

Shapes:  those of kernels/attention/variable_length.py
Why:     cuDNN, which PyTorch gives this to, plans for each length in each thread: 75 ms at the first prompt of that length, and 1 s
         where the plan wants a kernel that it has not compiled (results/new_lengths.json).  Ours is compiled once for all.
Needs:   nothing
Gives:   nothing
Exact:   yes, but for the order of sums, in which PyTorch's own kernels differ as well
Refuses: more than one sequence, a mask, dropout, keys of another length, heads that the kernel does not take, what wants gradients;
         other devices than Hopper's are left as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.sizes import EXAMPLE, expression, sizes, value_of
from mmqc.graph.tokens.uses import named
from mmqc.kernels.attention.variable_length import has_kernel
from mmqc.passes.fold_query_groups import ATTENTION
from mmqc.passes.split_attention import NAMES

ENDS = "ends of one sequence"  # in the meta of their node: its length


@dataclass(frozen=True)
class Site:
    """An attention, its operands, and what scores are multiplied by."""

    node: fx.Node
    operands: tuple[fx.Node, ...]
    scale: float | None

    def __str__(self) -> str:
        return f"{self.node.name}: {sizes(self.operands[0])[2]} tokens"  # type: ignore[index]


@dataclass(frozen=True)
class RewritePromptAttention(Pass):
    """Where a device has the kernel."""

    name = "rewrite_prompt_attention"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Causal attentions of one sequence."""
        for node in prog.graph.nodes:
            if not is_prompt(node):
                continue
            given = named(node, *NAMES)
            operands = tuple(given[name] for name in NAMES[:3])
            q, k, v = map(value_of, operands)
            if reason := _why_not(q, k, v, given):
                yield Miss(node.name, reason)
            elif _length(prog, operands[0]) is None:
                yield Miss(node.name, "no input of the graph has as many tokens")
            else:
                yield Site(node, operands, given.get("scale"))

    def rewrite(self, prog: Program, site: Site) -> None:
        """The call in its place; the ends of the sequence in front of all layers, once."""
        ends = _ends(prog, site.operands[0])
        op, length = torch.ops.mmqc_front.scaled_dot_product_attention.default, ends.args[1]
        with prog.graph.inserting_before(site.node):
            new = prog.graph.call_function(op, (*site.operands, ends, ends, site.scale, True, length))
        copy_meta(new, site.node, self.name, 0)
        new.meta[EXAMPLE] = value_of(site.node)
        site.node.replace_all_uses_with(new)
        prog.graph.erase_node(site.node)


def is_prompt(node: fx.Node) -> bool:
    """Whether a node is a causal attention without a mask on a device that has the kernel."""
    if kind(node) != ATTENTION or "mmqc" in str(node.target):
        return False
    given = named(node, *NAMES)
    q = value_of(given.get("query"))
    return given.get("is_causal") is True and given.get("attn_mask") is None and isinstance(q, Tensor) and has_kernel(q)


def _why_not(q: Any, k: Any, v: Any, given: dict[str, Any]) -> str | None:
    """None, or what about an attention the call does not know."""
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        return "its operands are not of four axes"
    (batch, heads, length, width), of_k, of_v = (tuple(map(expression, x.shape)) for x in (q, k, v))
    checks = (
        (not given.get("dropout_p"), "it drops probabilities"),
        (batch == 1, "it is of several sequences"),
        (of_k == of_v == (1, of_k[1], length, width), "its keys are not as many as its queries"),
        (isinstance(heads, int) and isinstance(of_k[1], int) and heads % of_k[1] == 0, "its heads are no groups"),
        (isinstance(given.get("scale", 1.0), float | int | None), "its scale is computed"),
        (q.dtype == k.dtype == v.dtype, "its operands are of several dtypes"),
        (not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))), "it wants gradients"),
    )
    return next((why for ok, why in checks if not ok), None)


def _length(prog: Program, query: fx.Node) -> int | tuple[fx.Node, int | None] | None:
    """T, or an input that says it: a size, or a tensor and its axis; None if there is neither."""
    length = sizes(query)[2]  # type: ignore[index]
    if isinstance(length, int):
        return length
    for node in prog.graph.nodes:
        if node.op != "placeholder":
            break
        value = value_of(node)
        if isinstance(value, torch.SymInt) and expression(value) == length:
            return node, None
        if isinstance(value, Tensor) and length in (shape := tuple(map(expression, value.shape))):
            return node, shape.index(length)
    return None


def _ends(prog: Program, query: fx.Node) -> fx.Node:
    """(0, T), int32, in front of everything that is computed; the one that is there if it is for as many tokens."""
    length, q, where = sizes(query)[2], value_of(query), _length(prog, query)  # type: ignore[index]
    found = next((n for n in prog.graph.nodes if n.meta.get(ENDS) == length), None)
    if found is not None:
        return found
    with prog.graph.inserting_before(next(n for n in prog.graph.nodes if n.op != "placeholder")):
        if isinstance(where, tuple):
            holder, axis = where
            where = holder if axis is None else prog.graph.call_method("size", (holder, axis))
            where.meta.setdefault(EXAMPLE, q.shape[2])
        steps = prog.graph.call_function(torch.arange, (2,), {"dtype": torch.int32, "device": q.device})
        ends = prog.graph.call_function(operator.mul, (steps, where))
    steps.meta[EXAMPLE], ends.meta[EXAMPLE] = q.new_empty(2, dtype=torch.int32), q.new_empty(2, dtype=torch.int32)
    ends.meta[ENDS] = length
    return ends
