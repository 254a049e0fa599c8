"""A positive factor per channel, moved from the weights that write a set of channels to those that read them.

    W x = (W diag(s)) (diag(1/s) x)        readers: W <- W diag(s)        writers: w <- w / s, or for a gain w + c: (w + c) / s - c

Shapes:  s [n], one factor for each channel
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmqc.graph.changes import Placed, Times


@dataclass(frozen=True)
class Part:
    """An axis of a weight on which scaled channels lie.

    Attributes:
        fqn, axis: the weight and its axis.
        index: int64 [m], places on the axis; several may be the same channel (a GQA output projection, a patch merger).
        channel: int64 [m], which of the n channels each is.
        reads: whether the axis reads the channels (is multiplied by s) or writes them (is divided by s).
        shift: c, where what the weight stands for is w + c (a norm's 1 + w).
    """

    fqn: str
    axis: int
    index: Tensor
    channel: Tensor
    reads: bool
    shift: float = 0.0

    def factor(self, scale: Tensor, size: int) -> Tensor:
        """The factor float64 [size] of every place on the axis."""
        s = scale.double()[self.channel.to(scale.device)]
        whole = torch.ones(size, dtype=torch.float64, device=scale.device)
        return whole.index_copy(0, self.index.to(scale.device), s if self.reads else 1 / s)

    def step(self, scale: Tensor) -> Callable[[Tensor], Tensor]:
        """The function of a whole weight that scales this part of it."""
        if not self.shift:
            s = scale.double()[self.channel.to(scale.device)]
            return Placed(self.axis, self.index[None], Times(s if self.reads else 1 / s))

        def scaled(w: Tensor) -> Tensor:
            last = w.movedim(self.axis, -1)
            factor = self.factor(scale, last.shape[-1]).to(w)
            return ((last + self.shift) * factor - self.shift).movedim(-1, self.axis)

        return scaled

    def columns(self, size: int) -> Tensor:
        """The channel int64 [size] at every place on the axis, -1 for those that are none."""
        return torch.full((size,), -1).index_copy(0, self.index, self.channel)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Channels that are scaled, and every weight axis on which they lie."""

    scale: Tensor
    parts: tuple[Part, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; the scale in base64, being as many numbers as there are channels in the model."""
        raw = base64.b64encode(self.scale.detach().cpu().double().numpy().tobytes()).decode("ascii")
        parts = [[p.fqn, p.axis, runs(p.index), runs(p.channel), p.reads, p.shift] for p in self.parts]
        return {"scale": raw, "parts": parts}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scaling:
        """What ``to_dict`` wrote."""
        scale = torch.frombuffer(bytearray(base64.b64decode(data["scale"])), dtype=torch.float64).clone()
        return cls(scale, tuple(Part(f, a, listed(i), listed(c), reads, shift) for f, a, i, c, reads, shift in data["parts"]))


def runs(index: Tensor) -> list[list[int]]:
    """[start, length] of every stretch that ascends by one."""
    if not index.numel():
        return []
    breaks = (index.diff() != 1).nonzero().flatten() + 1
    pieces = index.cpu().tensor_split(breaks.cpu())
    return [[int(piece[0]), len(piece)] for piece in pieces]


def listed(stretches: list[list[int]]) -> Tensor:
    """What ``runs`` was made of."""
    return torch.cat([torch.arange(start, start + length) for start, length in stretches] or [torch.zeros(0, dtype=torch.long)])
