"""One channel space: its width, the weight axes that lie on it, and what pins it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from mmqc.graph.changes import Placed
from mmqc.graph.spaces.coordinates import Source


@dataclass(frozen=True)
class Touch:
    """A weight axis on which a space lies: ``groups`` is int64 [copies, n]; ``role`` is writer or reader."""

    fqn: str
    axis: int
    groups: Tensor
    role: str
    node: fx.Node

    def __str__(self) -> str:
        copies, n = self.groups.shape
        return f"{self.role} {self.fqn} axis {self.axis}: {copies} x {n}"

    def apply(self, change: Callable[[Tensor], Tensor]) -> Placed:
        """The function of a whole weight that applies ``change`` ([..., copies, n] to the same) on this axis."""
        return Placed(self.axis, self.groups, change)


@dataclass(eq=False)
class Space:
    """n channels that belong together.

    Attributes:
        width: n.
        classes: int64 [n], ascending.
        touches: the weight axes that lie on it.
        norms: unit-scale norms over it.
        pins: (node, reason) of everything that no rotation passes; empty means free.
        mean_pins: layer_norm nodes over it, which only need its mean removed, and how many channels each covers.
        inputs, outputs: whether graph inputs write it, or graph outputs read it.
        made: operations (a non-linearity, a gain) that write it.
        gains: for each gain that writes it (by the names of its weights) the gain element behind each coordinate, int64 [n].
    """

    width: int
    classes: Tensor
    touches: list[Touch] = field(default_factory=list)
    norms: list[fx.Node] = field(default_factory=list)
    pins: list[tuple[fx.Node, str]] = field(default_factory=list)
    mean_pins: dict[fx.Node, int] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    made: list[Source] = field(default_factory=list)
    gains: dict[str, Tensor] = field(default_factory=dict)

    def touch(self, new: Touch) -> None:
        """Add a touch; a weight that is used at several calls is one touch."""
        for old in self.touches:
            if (old.fqn, old.axis, old.role) == (new.fqn, new.axis, new.role) and torch.equal(old.groups, new.groups):
                return
        self.touches.append(new)

    @property
    def writers(self) -> list[Touch]:
        """Touches that produce the space."""
        return [t for t in self.touches if t.role == "writer"]

    @property
    def readers(self) -> list[Touch]:
        """Linears that consume it."""
        return [t for t in self.touches if t.role == "reader"]

    @property
    def inside(self) -> bool:
        """Whether weights alone write it and no graph boundary shows it."""
        return not (self.inputs or self.outputs or self.made)

    @property
    def norm_modules(self) -> set[str]:
        """The norms over it, each once however often it was called."""
        return {n.meta.get("module") or n.name for n in (*self.norms, *self.mean_pins)}

    @property
    def why_pinned(self) -> str:
        """The first pin in words."""
        return f"{self.pins[0][0].name}: {self.pins[0][1]}" if self.pins else ""

    def __str__(self) -> str:
        kinds = f"{len(self.writers)} writers, {len(self.readers)} readers, {len(self.norm_modules)} norms"
        edge = "".join(
            f", {word}" for word, there in (("input", self.inputs), ("output", self.outputs), ("made", self.made)) if there
        )
        pin = f", pinned by {self.why_pinned}" if self.pins else ""
        return f"space of {self.width}: {kinds}{edge}{pin}"
