"""``plan``: what the exact rewrites would do with a model, without changing it: its channel spaces, and every pass.

Nothing is computed from the weights' values, so a model of any size can be planned on the meta device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmqc.config import QuantConfig
from mmqc.graph.capture import unwrapped
from mmqc.graph.kinds import kind
from mmqc.graph.plan import Plan
from mmqc.graph.program import PassRecord
from mmqc.graph.record import record
from mmqc.graph.runner import run
from mmqc.graph.spaces.spaces import Space, Spaces
from mmqc.graph.spaces.text import spaces_text
from mmqc.nn.eval_mode import evaluating
from mmqc.nn.ordinary import ordinary
from mmqc.nn.unseen import Reached, unsure_weights
from mmqc.passes.suppress_magnitude import SuppressMagnitude
from mmqc.pipeline import FACTS, folding_passes, rotating_passes
from mmqc.quantization.job import takes_cache


@dataclass(frozen=True)
class Planned:
    """The answer of ``plan``; ``str()`` of it is for reading.

    Attributes:
        spaces: the channel spaces after the norms' gains and means were folded and before anything is rotated.
        decided: which weight axes are rotated, and which linears get an online Hadamard.
        records: one per pass: sites, and what was refused and why.
        notes: what could not be recorded.
        seconds: recording, analysis and passes.
    """

    spaces: tuple[Space, ...]
    decided: Plan
    records: tuple[PassRecord, ...]
    notes: tuple[str, ...]
    seconds: float

    def is_rotated(self, space: Space) -> bool:
        """Whether every weight axis on this space is rotated."""
        return bool(space.touches) and all(self.decided.is_rotated(t.fqn, t.axis, t.groups) for t in space.touches)

    def status(self, space: Space) -> str:
        """What becomes of a space, in words."""
        if self.is_rotated(space):
            return "rotated"
        online = {t.fqn for t in space.readers} & self.decided.hadamards
        return "online Hadamard in front of its readers" if online else "left alone"

    def __str__(self) -> str:
        rotated = sum(map(self.is_rotated, self.spaces))
        head = f"{rotated} channel spaces rotated, {len(self.decided.hadamards)} online Hadamards; planned in {self.seconds:.1f} s"
        passes = "\n".join(str(r) for r in self.records)
        notes = "\n".join(f"note: {note}" for note in self.notes)
        return "\n\n".join(filter(None, (head, passes, notes, spaces_text(self.spaces, self.status))))


@ordinary()
@torch.no_grad()
def plan(model: nn.Module, config: QuantConfig, batch: Mapping[str, Any]) -> Planned:
    """Record ``model`` on one batch and run the exact passes of ``config``; the model is not changed.

    Args:
        model: any model; its parameters may be on the meta device (``with torch.device("meta"): ...from_config(...)``).
        config: a recipe, e.g. ``mmqc.recipes.rotate()``.
        batch: keyword arguments of its forward.  For a model on the meta device ids, grids and masks are real tensors;
            floats may be on any device.

    Raises:
        TypeError: the model is no ``torch.nn.Module``.
        RecordError: the forward cannot be recorded.
    """
    start, model = time.perf_counter(), unwrapped(model)
    with evaluating(model):
        prog = record(model, {**batch, "use_cache": False} if takes_cache(model) else dict(batch))
    prog.unsure = unsure_weights(model, Reached.by(prog.called, prog.weights.values()))
    run(prog, folding_passes(config), FACTS)
    spaces = tuple(Spaces.of(prog))
    order = {node: i for i, node in enumerate(prog.graph.nodes)}
    has_values = not any(p.is_meta for p in model.parameters())
    run(prog, (p for p in rotating_passes(config) if has_values or not isinstance(p, SuppressMagnitude)), FACTS)
    spaces = tuple(sorted(filter(_of_linears, spaces), key=lambda s: min(order[t.node] for t in s.touches)))
    seconds = time.perf_counter() - start
    return Planned(spaces, prog.decided, tuple(prog.records), tuple(prog.notes), seconds)


def _of_linears(space: Space) -> bool:
    """Whether a linear reads or writes the space; a convolution, an embedding or a parameter alone does not count."""
    return any(kind(t.node) not in ("conv", "embedding", "get_attr") for t in space.touches)
