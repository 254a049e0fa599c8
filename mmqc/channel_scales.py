"""AWQ between the exact rewrites and calibration: measure the inputs of the linears that can be scaled, choose, scale.

    live forwards  ->  XᵀX and mean|x| of every set of readers  ->  solvers/awq.py  ->  passes/fold_channel_scale.py

Linears that read one tensor (q, k and v) share one second moment.  Sites are taken in rounds whose moments fit ``MOMENT_BYTES``;
each round is one more run over the calibration batches, so that memory does not grow with the model's depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .calibrate import hooked, linear_input
from .config import ChannelScales
from .graph.linear import operands, weight_of
from .graph.program import Program
from .graph.runner import run
from .passes.fold_channel_scale import Chosen, FoldChannelScale, Site
from .pipeline import FACTS
from .solvers import awq

MOMENT_BYTES = 4 << 30


@dataclass
class Moments:
    """XᵀX float64 [K, K] and sum|x| float64 [K] of one linear's input rows."""

    square: Tensor | None = None
    magnitude: Tensor | None = None
    rows: int = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Take in a forward's input."""
        x = linear_input(module, args[0].detach())
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.dtype == torch.float64 else rows.float()
        square, magnitude = (rows.T @ rows).double(), rows.abs().sum(0, dtype=torch.float64)
        self.square = square if self.square is None else self.square.add_(square)
        self.magnitude = magnitude if self.magnitude is None else self.magnitude.add_(magnitude)
        self.rows += len(rows)


@torch.no_grad()
def scale_channels(
    model: nn.Module, prog: Program, options: ChannelScales, batches: Callable[[], Iterable[Mapping[str, Any]]]
) -> None:
    """Run ``fold_channel_scale`` on ``prog`` with AWQ's factors.

    Args:
        model: runs the batches; its weights are those of ``prog``.
        prog: its linears have schemes.
        options: of the search.
        batches: gives the calibration batches, as often as it is called.
    """
    item = FoldChannelScale(average=options.shared_heads == "average")
    sites = [s for s in item.sites(prog) if isinstance(s, Site)]
    shared = _inputs(prog)
    chosen: dict[frozenset[str], Chosen] = {}
    for part in _rounds(sites, shared, prog):
        names = {shared[fqn]: fqn for site in part for fqn in site.schemes}
        moments = {key: Moments() for key in names}
        hooks = ((model.get_submodule(fqn.removesuffix(".weight")), moments[key]) for key, fqn in names.items())
        with hooked(hooks):
            for batch in batches():
                model(**batch)
        for site in part:
            readers = [r for fqn in site.schemes if (r := _reader(prog, site, fqn, moments[shared[fqn]])) is not None]
            if readers:
                found = awq.search(readers, site.width, duo=options.duo, grid=options.grid)
                chosen[_key(site)] = (found.scale, str(found))
    run(prog, [FoldChannelScale(lambda site: chosen.get(_key(site)), item.average)], FACTS, text=True)


def _key(site: Site) -> frozenset[str]:
    return frozenset(f"{p.fqn} {p.axis}" for p in site.parts)


def _inputs(prog: Program) -> dict[str, tuple[fx.Node, ...]]:
    """What each linear reads, by the FQN of its weight, over all recorded calls."""
    found: dict[str, tuple[fx.Node, ...]] = {}
    for node in prog.nodes("linear"):
        found[weight_of(node)] = (*found.get(weight_of(node), ()), operands(node)["input"])
    return found


def _rounds(sites: list[Site], shared: Mapping[str, Any], prog: Program) -> Iterable[list[Site]]:
    """Sites in order, in parts whose second moments fit."""
    part, there, size = [], set(), 0
    for site in sites:
        new = {shared[fqn]: 8 * prog.weights[fqn].shape[-1] ** 2 for fqn in site.schemes if shared[fqn] not in there}
        if part and size + sum(new.values()) > MOMENT_BYTES:
            yield part
            part, there, size = [], set(), 0
            new = {shared[fqn]: 8 * prog.weights[fqn].shape[-1] ** 2 for fqn in site.schemes}
        part.append(site)
        there |= new.keys()
        size += sum(new.values())
    if part:
        yield part


def _reader(prog: Program, site: Site, fqn: str, seen: Moments) -> awq.Reader | None:
    """A reader with its statistics; None if no row reached it."""
    if seen.square is None or seen.magnitude is None or not seen.rows:
        return None
    weight = prog.value(fqn)
    channel = torch.full((weight.shape[-1],), -1)
    for part in site.parts:
        if part.fqn == fqn and part.reads:
            channel = torch.maximum(channel, part.columns(weight.shape[-1]))
    return awq.Reader(fqn, weight, channel, seen.square, seen.magnitude / seen.rows, site.schemes[fqn].weight)
