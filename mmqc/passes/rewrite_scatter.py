"""Whole rows that take the places of others, such as images' embeddings in a prompt, are found row by row.

    masked_scatter(x, mask, source)  ->  where(mask, source[cumsum(mask) − 1], x)

Shapes:  x [..., C]   mask bool [..., 1], or that expanded to x   source [..., C], its rows in order
Why:     PyTorch counts the true entries in front of each entry, and Inductor does so on a GPU: 6,417 tokens of 3,584 channels are
         23 million.  That takes 0.46 ms (H100), and 28 ms where a size in the graph lets it scan with one program.  Here it
         counts tokens.
Needs:   nothing
Gives:   nothing
Exact:   yes, to the bit: rows change their places, not their values
Refuses: –; a mask of single channels, other dtypes and ``masked_scatter_`` are left as they are.  CPUs: PyTorch counts while it
         copies there, and has nothing to compile for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass

DEVICES = ("cuda",)
KIND = "masked_scatter"
_NAMES = ("input", "mask", "source")


@dataclass(frozen=True)
class Site:
    """The operation, with its operands; ``mask`` is that of rows."""

    scatter: fx.Node
    x: fx.Node
    mask: fx.Node
    source: fx.Node

    def __str__(self) -> str:
        return f"{self.scatter.name}: rows of {self.source.name} in {self.x.name}"


@dataclass(frozen=True)
class RewriteScatter(Pass):
    name = "rewrite_scatter"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every one by a mask of rows."""
        for node in prog.graph.nodes:
            site = scatter_of(node)
            if site is not None:
                yield site

    def rewrite(self, prog: Program, site: Site) -> None:
        """Count rows, and take them where the mask says so."""
        x, _, source = _operands(site.scatter)  # now: what stood there as it was found may be rewritten, videos behind images
        channels, numbers = x.meta["example_value"].shape[-1], itertools.count()

        def made(target: Any, *args: Any) -> fx.Node:
            node = prog.graph.call_function(target, args)
            copy_meta(node, site.scatter, self.name, next(numbers))
            node.meta["example_value"] = target(*fx.map_arg(args, lambda n: n.meta["example_value"]))
            return node

        with prog.graph.inserting_before(site.scatter):
            rows = made(torch.reshape, site.mask, (-1,))
            order = made(torch.sub, made(torch.cumsum, rows, 0), 1)
            source = made(torch.reshape, source, (-1, channels))
            wide = made(torch.ops.aten.expand.default, made(torch.unsqueeze, rows, 1), [-1, channels])
            # A row outside the mask has no number: what is not picked is not read.
            picked = made(torch.ops.aten._unsafe_masked_index.default, source, wide, [order, None], 0)
            new = made(torch.where, site.mask, made(torch.ops.aten.view_as.default, picked, x), x)
        site.scatter.replace_all_uses_with(new)
        prog.graph.erase_node(site.scatter)


def scatter_of(node: fx.Node) -> Site | None:
    """A ``masked_scatter`` of whole rows; None for any other node."""
    if kind(node) != KIND or str(node.target).endswith("_"):
        return None
    x, mask, source = _operands(node)
    if not isinstance(x, fx.Node) or not isinstance(source, fx.Node):
        return None
    mask = _of_rows(mask)
    if mask is None:
        return None
    a, b, c = (n.meta.get("example_value") for n in (x, mask, source))
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not isinstance(c, Tensor):
        return None
    if a.device != b.device or a.device.type not in DEVICES:
        return None
    rows = b.dim() == a.dim() and all(map(_same, b.shape[:-1], a.shape[:-1]))
    fits = rows and c.dim() > 1 and type(a.shape[-1]) is int and _same(a.shape[-1], c.shape[-1])
    return Site(node, x, mask, source) if fits and a.dtype == c.dtype and b.dtype == torch.bool else None


def _operands(scatter: fx.Node) -> tuple[Any, Any, Any]:
    given = {**dict(zip(_NAMES, scatter.args, strict=False)), **scatter.kwargs}
    x, mask, source = (given.get(name) for name in _NAMES)
    return x, mask, source


def _of_rows(mask: Any) -> fx.Node | None:
    """The mask of rows [..., 1] behind a mask, if there is one."""
    while isinstance(mask, fx.Node):
        value = mask.meta.get("example_value")
        if isinstance(value, Tensor) and value.dim() > 1 and type(value.shape[-1]) is int and value.shape[-1] == 1:
            return mask
        mask = mask.args[0] if mask.args and kind(mask) in ("expand", "expand_as", "to") else None
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal, without deciding it for other sizes."""
    return a == b if type(a) is int and type(b) is int else str(a) == str(b)
