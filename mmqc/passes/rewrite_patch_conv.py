"""A convolution whose kernel covers all of its input is a linear.

    conv(x, W, b)  ->  linear(x.flatten(1), W.flatten(1), b).reshape(P, N, 1, …, 1)

Shapes:  x [P, C, *K]   W [N, C, *K]   b [N]
Why:     towers of the Qwen family get their patches cut out, and embed each by a convolution with one place to be.  cuDNN has an
         "implicit convolution" for it that uses no tensor cores: 3.6 ms for 25,600 patches of 1,176 numbers in bf16 (H100), where
         the product is 77 GFLOP and its bytes take 40 us.
Needs:   nothing
Gives:   nothing
Exact:   yes; the same sums, in another order
Refuses: –; a kernel that moves, groups, dilation and padding are another operation.  CPUs: their convolution is a product already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass

DEVICES = ("cuda",)
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_PLAIN = {"padding": 0, "dilation": 1, "groups": 1}


@dataclass(frozen=True)
class Site:
    """The convolution, with its operands."""

    conv: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    def __str__(self) -> str:
        return f"{self.conv.name} {list(self.weight.meta['example_value'].shape)}"


@dataclass(frozen=True)
class RewritePatchConv(Pass):
    name = "rewrite_patch_conv"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every convolution with one place to be."""
        for node in prog.graph.nodes:
            site = site_of(node)
            if site is not None:
                yield site

    def rewrite(self, prog: Program, site: Site) -> None:
        """As a linear."""
        x, *_ = _operands(site.conv)  # now: it may be another convolution's result, which has been rewritten
        graph, ones = prog.graph, [1] * (site.weight.meta["example_value"].dim() - 2)
        with graph.inserting_before(site.conv):
            rows, weight = (graph.call_method("flatten", (of, 1)) for of in (x, site.weight))
            product = graph.call_function(F.linear, (rows, weight, site.bias))
            new = graph.call_method("reshape", (product, -1, site.weight.meta["example_value"].shape[0], *ones))
        for i, node in enumerate((rows, weight, product, new)):
            copy_meta(node, site.conv, self.name, i)
        rows.meta["example_value"] = x.meta["example_value"].flatten(1)
        weight.meta["example_value"] = site.weight.meta["example_value"].flatten(1)
        new.meta["example_value"] = site.conv.meta["example_value"]
        product.meta["example_value"] = new.meta["example_value"].flatten(1)
        site.conv.replace_all_uses_with(new)
        graph.erase_node(site.conv)


def site_of(node: fx.Node) -> Site | None:
    """A convolution with one place to be; None for any other node."""
    if kind(node) != "conv" or "transpose" in str(node.target):
        return None
    x, weight, bias, given = _operands(node)
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or not isinstance(bias, fx.Node | None):
        return None
    if any(set(_numbers(given.get(name, plain))) != {plain} for name, plain in _PLAIN.items()):
        return None
    kernel, patch = weight.meta.get("example_value"), x.meta.get("example_value")
    if not isinstance(kernel, Tensor) or not isinstance(patch, Tensor) or patch.device.type not in DEVICES:
        return None
    sizes = list(patch.shape[1:]) if patch.dim() == kernel.dim() else []
    covers = bool(sizes) and all(map(_is, sizes, kernel.shape[1:]))
    return Site(node, x, weight, bias) if covers and isinstance(node.meta.get("example_value"), Tensor) else None


def _operands(conv: fx.Node) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(x, weight, bias, all by name)."""
    given: dict[str, Any] = {**dict(zip(_NAMES, conv.args, strict=False)), **conv.kwargs}
    x, weight, bias = (given.get(name) for name in _NAMES[:3])
    return x, weight, bias, given


def _is(size: Any, known: int) -> bool:
    """Whether a size is this number; one that may vary and is now, stays so: the graph is compiled anew where it is not."""
    return size == known if type(size) is int else size.node.hint == known and bool(size == known)


def _numbers(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, tuple | list | torch.Size) else (given,)
