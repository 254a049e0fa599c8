"""Attention of one new token is summed in parts of the cache at once, and nothing that its mask hides is read.

    sdpa(q [B, H, R, D], k, v, mask [B or 1, 1, 1, S])  ->  decode_attention(q, k, v, mask, scale)

Shapes:  those of ops/decode_attention.py; R is 1, or the query heads of a KV head (fold_query_groups.py)
Why:     a kernel made for prompts gives each head to one multiprocessor, which reads the whole cache; PyTorch's of a bool mask make
         a bias of it in every layer first.
Needs:   nothing
Gives:   nothing
Exact:   yes, but for the order of sums, in which PyTorch's own kernels differ as well
Refuses: dropout; a causal attention; a mask of numbers, by head or by query; what wants gradients; other devices than CUDA.
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
from mmqc.graph.sizes import agree, expression, sizes, value_of
from mmqc.passes.fold_query_groups import ATTENTION

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class Site:
    """An attention, its operands, and what scores are multiplied by."""

    node: fx.Node
    operands: tuple[Any, ...]
    scale: float

    def __str__(self) -> str:
        return f"{self.node.name}: {sizes(self.operands[0])[2]} rows for each of {self.operands[1].name}"  # type: ignore[index]


@dataclass(frozen=True)
class SplitAttention(Pass):
    """On these kinds of devices."""

    name = "split_attention"
    devices: tuple[str, ...] = ("cuda",)

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Attentions whose rows all see the same tokens."""
        for node in prog.graph.nodes:
            if kind(node) != ATTENTION:
                continue
            given = dict(zip(NAMES, node.args, strict=False)) | node.kwargs
            query, key, value, mask = (given.get(name) for name in NAMES[:4])
            q, k, v, seen = map(value_of, (query, key, value, mask))
            if not all(isinstance(x, Tensor) for x in (q, k, v)) or q.device.type not in self.devices:
                continue
            if q.dim() != 4 or not (expression(q.shape[2]) == 1 or _is_one_row(seen)):
                continue
            if reason := _why_not(q, k, v, mask, seen, given) or _why_not_sizes(q, k, v, seen):
                yield Miss(node.name, reason)
                continue
            scale = given.get("scale")
            yield Site(node, (query, key, value, mask), float(q.shape[3] ** -0.5 if scale is None else scale))

    def rewrite(self, prog: Program, site: Site) -> None:
        """The op in its place."""
        with prog.graph.inserting_before(site.node):
            new = prog.graph.call_function(torch.ops.mmqc.decode_attention.default, (*site.operands, site.scale))
        copy_meta(new, site.node, self.name, 0)
        site.node.replace_all_uses_with(new)


def _is_one_row(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 4 and expression(mask.shape[2]) == 1


def _why_not(q: Tensor, k: Tensor, v: Tensor, mask: Any, seen: Any, given: dict[str, Any]) -> str | None:
    """None, or what about an attention the op does not know."""
    checks = (
        (not given.get("dropout_p"), "it drops probabilities"),
        (not given.get("is_causal"), "it is causal"),
        (mask is None or (isinstance(seen, Tensor) and seen.dtype == torch.bool), "its mask is of numbers"),
        (isinstance(given.get("scale", 1.0), float | int | None), "its scale is computed"),
        (q.device.type == "cpu" or q.dtype in (torch.float16, torch.bfloat16), f"it is in {q.dtype}"),
        (q.dtype == k.dtype, "queries and keys are of two dtypes"),
        (not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))), "it wants gradients"),
    )
    return next((why for ok, why in checks if not ok), None)


def _why_not_sizes(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> str | None:
    """The same of its sizes."""
    rows, width = q.shape[2:]
    checks = (
        (agree(k.shape, v.shape), "values are not like keys"),
        (k.dim() == 4 and agree((*q.shape[:2], width), (*k.shape[:2], k.shape[3])), "its keys are of other heads"),
        (isinstance(rows, int) and rows <= 64, "it has more than 64 rows"),
        (isinstance(width, int) and width <= 256, "its heads have more than 256 channels"),
        (mask is None or _is_one_for_all(mask, q, k), "its mask is not one for all rows"),
    )
    return next((why for ok, why in checks if not ok), None)


def _is_one_for_all(mask: Tensor, q: Tensor, k: Tensor) -> bool:
    batch, tokens = expression(mask.shape[0]), (1, 1, k.shape[2])
    return mask.dim() == 4 and agree(mask.shape[1:], tokens) and (batch == 1 or agree(mask.shape[:1], q.shape[:1]))
