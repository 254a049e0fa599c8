"""Learn what a block's weights are rounded to, by gradients of the block's own output.

    minimise  sum over tokens of  a_m |f(x; Ŵ) - f(x; W)|²        f: the block        a: weight of the modality

    Ŵ = (clamp(round(q + v)) - z) s exp(t)        v [N, K], t like s: learned, 0 at first        round passes gradients on

Shapes:  W [N, K]    q int8 [N, K]    s, z, t [N] or [N, ceil(K/g)]
Start:   any solver's codes and scales (GPTQ's).  What is kept is the best that was seen on all batches: never worse than the start.
Why:     a linear's own error does not say what it does behind a softmax or a non-linearity, nor what other linears make up for.
Source:  AutoRound's learned rounding and ranges (Cheng et al., arXiv:2309.05516), with Adam in place of signed gradients and
         GPTQ's codes in place of the nearest ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmqc.solvers.quantized import Quantized, levels

BATCHES = 8  # of a step
LOOKS = 8  # how often the loss of all batches is measured
OFFSET_RATE, STRETCH_RATE = 1e-2, 2e-3  # Adam's, falling to zero


@dataclass(frozen=True)
class Start:
    """A weight before learning.

    Attributes:
        solved: its codes and scales.
        bits: of a code.
        kept: (columns int64 [r], values [N, r]) that stay in floating point; None if there are none.
    """

    solved: Quantized
    bits: int
    kept: tuple[Tensor, Tensor] | None = None


class Rounding:
    """One weight's offsets and stretches."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.offset = torch.zeros(start.solved.codes.shape, device=start.solved.codes.device, requires_grad=True)
        self.stretch = torch.zeros_like(start.solved.scale, requires_grad=True)

    def codes(self) -> Tensor:
        """Integers in float32, with the gradient of what they are rounded from, where that is within the grid."""
        low, high = levels(self.start.bits)
        wide = (self.start.solved.codes + self.offset).clamp(low - 0.5, high + 0.5)
        return wide + (wide.round().clamp(low, high) - wide).detach()

    def weight(self) -> Tensor:
        """Ŵ float32 [N, K]."""
        solved = self.start.solved
        codes = self.codes() if solved.zero is None else self.codes() - solved.by_channel(solved.zero)
        weight = codes * solved.by_channel(solved.scale * self.stretch.exp())
        return weight if self.start.kept is None else weight.index_copy(1, *self.start.kept)

    @torch.no_grad()
    def solved(self) -> Quantized:
        """Codes and scales as they are now."""
        solved = self.start.solved
        return replace(solved, codes=self.codes().to(torch.int8), scale=solved.scale * self.stretch.exp())


def learn(
    starts: Mapping[str, Start], loss: Callable[[int, Mapping[str, Tensor]], Tensor], batches: Sequence[int], steps: int
) -> tuple[dict[str, Quantized], float, float]:
    """The weights, the loss that they started with, and the one that they ended with.

    Args:
        starts: by a name of each weight.
        loss: of (number of a batch, weights float32 by these names), differentiable; summed over batches.
        batches: their numbers.
        steps: of gradient descent; 0 changes nothing.
    """
    roundings = {name: Rounding(start) for name, start in starts.items()}
    offsets, stretches = ([getattr(r, part) for r in roundings.values()] for part in ("offset", "stretch"))
    optimizer = torch.optim.Adam([{"params": offsets, "lr": OFFSET_RATE}, {"params": stretches, "lr": STRETCH_RATE}])
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(steps, 1))
    best = {name: start.solved for name, start in starts.items()}
    first = least = _total(roundings, loss, batches)
    draw, every = random.Random(0), max(1, steps // LOOKS)
    for step in range(1, steps + 1):
        with torch.enable_grad():
            weights = {name: r.weight() for name, r in roundings.items()}
            chosen = draw.sample(list(batches), min(BATCHES, len(batches)))
            of_weights = [torch.zeros_like(w) for w in weights.values()]
            for batch in chosen:  # one at a time: the activations of one batch are what is in flight
                leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
                for total, part in zip(of_weights, torch.autograd.grad(loss(batch, leaves), list(leaves.values())), strict=True):
                    total += part
            torch.autograd.backward(list(weights.values()), of_weights)
        optimizer.step()
        optimizer.zero_grad()
        slower.step()
        if step % every == 0 or step == steps:
            found = _total(roundings, loss, batches)
            if found < least:
                least, best = found, {name: r.solved() for name, r in roundings.items()}
    return best, first, least


@torch.no_grad()
def _total(roundings: Mapping[str, Rounding], loss: Callable[..., Tensor], batches: Sequence[int]) -> float:
    weights = {name: r.weight() for name, r in roundings.items()}
    return float(sum(loss(batch, weights).double() for batch in batches))
