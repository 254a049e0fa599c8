"""Counters that move by the same amount move together, at the end.

    n_0.add_(1) … n_27.add_(1)  ->  … _foreach_add_([n_0, …, n_27], 1)

Shapes:  every counter []
Why:     transformers' static cache counts its tokens in each layer, on the device.  A decode step of 28 layers had 28 kernels that
         add one to one number, each of which waits for its layer; Inductor makes one kernel of the list.
Needs:   nothing
Gives:   nothing
Exact:   yes, to the bit
Refuses: –; a move whose counter is read or moved again afterwards, or by a tensor, stays where it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from mmqc.graph.program import KEPT, Miss, Program, copy_meta
from mmqc.graph.runner import Pass


@dataclass(frozen=True)
class Site:
    """The nodes that move counters by one amount."""

    moves: tuple[fx.Node, ...]

    def __str__(self) -> str:
        return f"{len(self.moves)} counters moved by {self.moves[0].args[1]}"


@dataclass(frozen=True)
class FuseCounters(Pass):
    name = "fuse_counters"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """All counters that move by one amount, on one device."""
        place = {node: i for i, node in enumerate(prog.graph.nodes)}
        groups: dict[tuple[object, ...], list[fx.Node]] = defaultdict(list)
        for node in place:
            if moves_counter(node) and all(place[user] <= place[node] for user in _counter(node).users):
                value = _counter(node).meta["example_value"]
                groups[(node.args[1], value.dtype, value.device)].append(node)
        yield from (Site(tuple(moves)) for moves in groups.values() if len(moves) > 1)

    def rewrite(self, prog: Program, site: Site) -> None:
        """One list, in front of the output."""
        output = next(n for n in reversed(prog.graph.nodes) if n.op == "output")
        with prog.graph.inserting_before(output):
            new = prog.graph.call_function(torch._foreach_add_, ([_counter(n) for n in site.moves], site.moves[0].args[1]))
        copy_meta(new, site.moves[0], self.name, 0)
        new.meta[KEPT] = True
        for node in site.moves:
            prog.graph.erase_node(node)


def moves_counter(node: fx.Node) -> bool:
    """Whether a node adds a constant to one number that was given to the graph, and nothing reads what it returns."""
    if node.op != "call_method" or node.target != "add_" or len(node.args) != 2 or node.kwargs or node.users:
        return False
    counter, amount = node.args
    value = counter.meta.get("example_value") if isinstance(counter, fx.Node) and counter.op == "placeholder" else None
    return type(amount) is int and isinstance(value, Tensor) and value.dim() == 0 and not value.dtype.is_floating_point


def _counter(move: fx.Node) -> fx.Node:
    counter = move.args[0]
    assert isinstance(counter, fx.Node)
    return counter
