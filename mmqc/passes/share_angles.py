"""Cosines and sines that every layer reads are put into memory once, in the shape in which they are read.

    c = cat(split(cos(θ))).to(dtype), q ∘ c in every layer  ->  c = materialize(...), q ∘ c in every layer

Shapes:  c as it was, contiguous
Why:     RoPE's table is [S, D], but what it is made of is cheap, so Inductor inlines it into each layer's kernel over [H, S, D]:
         for Qwen2-VL six masked loads, strided by tokens, of every cosine and of every sine.
Needs:   nothing
Gives:   nothing
Exact:   yes, to the bit
Refuses: –; a table of fewer than four readers, q and k of two layers, stays as it is
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind, mutates
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass

ANGLES = ("cos", "sin")
PIECES = ("split", "chunk", "unbind")
CASTS = ("to", "float", "half", "bfloat16", "type_as")
STEPS = ("cat", "stack", "repeat_interleave", "mul", *PIECES, *CASTS)
VIEWS = ("unsqueeze", "squeeze", "getitem", "view", "reshape", "flatten", "expand", "permute", "transpose", "contiguous")
READERS = 4


@dataclass(frozen=True)
class Site:
    """The table, and how many operations read it."""

    table: fx.Node
    readers: int

    def __str__(self) -> str:
        return f"{self.table.name}: {self.readers} readers"


@dataclass(frozen=True)
class ShareAngles(Pass):
    name = "share_angles"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every table that many read."""
        angles: dict[fx.Node, bool] = {}  # whether it is a view of another one, or a tuple of pieces
        for node in prog.graph.nodes:
            if kind(node) in ANGLES or _is_step(node, angles):
                angles[node] = kind(node) in PIECES or _is_same(node)
            elif kind(node) in VIEWS and isinstance(node.args[0], fx.Node) and node.args[0] in angles:
                angles[node] = True
        for node, view in angles.items():
            if view:
                continue
            users = list(_users(node, angles))
            if len(users) >= READERS and not any(u in angles for u in users):  # else it is on the way to the table
                yield Site(node, len(users))

    def rewrite(self, prog: Program, site: Site) -> None:
        """One copy, which everybody reads."""
        with prog.graph.inserting_after(site.table):
            new = prog.graph.call_function(torch.ops.mmqc.materialize.default, (site.table,))
        copy_meta(new, site.table, self.name, 0)
        new.meta["example_value"] = site.table.meta.get("example_value")
        site.table.replace_all_uses_with(new, lambda user: user is not new)


def _is_step(node: fx.Node, angles: dict[fx.Node, bool]) -> bool:
    """Whether node is made of angles alone, by moving, scaling or casting them."""
    if kind(node) not in STEPS or mutates(node) or any(n not in angles for n in node.all_input_nodes):
        return False
    return kind(node) != "mul" or any(isinstance(a, numbers.Number) for a in node.args)


def _is_same(node: fx.Node) -> bool:
    """Whether it is a cast to the dtype that its input has."""
    a, b = (n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in (node, node.args[0]))
    return kind(node) in CASTS and isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype


def _users(node: fx.Node, angles: dict[fx.Node, bool]) -> Iterator[fx.Node]:
    """What reads node, or a view of it."""
    for user in node.users:
        if angles.get(user) and kind(user) not in PIECES:
            yield from _users(user, angles)
        else:
            yield user
