"""Learn what a block's weights are rounded to, by gradients of the block's own output.

    minimise  sum over tokens of  a_m |f(x; Ŵ) - f(x; W)|²        f: the block        a: weight of the modality

    Ŵ = (clamp(round(q + v)) - z) s exp(t)        v [N, K], t like s: learned, 0 at first        round passes gradients on

Shapes:  W [N, K]    q int8 [N, K]    s, z, t [N] or [N, ceil(K/g)]
Start:   any solver's codes and scales (GPTQ's).  What is kept is the best of several looks at a part of the batches; if it is not
         better than the start on all of them, the start is kept.
Why:     a linear's own error does not say what it does behind a softmax or a non-linearity, nor what other linears make up for.
Source:  AutoRound's learned rounding and ranges (Cheng et al., arXiv:2309.05516), with Adam in place of signed gradients and
         GPTQ's codes in place of the nearest ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc.solvers.grid import grouped
from mmqc.solvers.quantized import Quantized, levels

BATCHES = 8  # of a step
LOOKS, LOOKED_AT = 8, 32  # how often the loss is measured, of how many batches
BatchLoss = Callable[[int], Tensor]
Held = Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
OFFSET_RATE, STRETCH_RATE = 1e-2, 2e-3  # Adam's, falling to zero


@dataclass(frozen=True)
class Start:
    """A weight before learning.

    Attributes:
        solved: its codes and scales.
        bits: of a code.
        kept: (columns int64 [r], values [N, r]) that stay in floating point; None if there are none.
        dtype: that the block takes it in.
    """

    solved: Quantized
    bits: int
    kept: tuple[Tensor, Tensor] | None = None
    dtype: torch.dtype = torch.float32

    def weight(self) -> Tensor:
        """What the block takes for these codes [N, K]."""
        weight = self.solved.dequantize()
        return (weight if self.kept is None else weight.index_copy(1, *self.kept)).to(self.dtype)


class Rounding:
    """One weight's offsets and stretches, and what depends on them: by hand, for autograd keeps every step of it.

    Everything is [N G, g] inside, a group a row, the last of each N filled up.
    """

    def __init__(self, start: Start) -> None:
        self.start, solved = start, start.solved
        self.begun = grouped(solved.codes, solved.group_size).flatten(0, 1).contiguous()
        self.scale = solved.scale.reshape(-1, 1).float().contiguous()
        self.zero = None if solved.zero is None else solved.zero.reshape(-1, 1).float()
        self.offset = torch.zeros(self.begun.shape, device=solved.codes.device, requires_grad=True)
        self.stretch = torch.zeros_like(self.scale, requires_grad=True)

    def whole(self, groups: Tensor) -> Tensor:
        """[N G, g] -> [N, K]."""
        rows, width = self.start.solved.codes.shape
        return groups.view(rows, -1)[:, :width]

    @torch.no_grad()
    def step(self) -> Tensor:
        """The scales [N G, 1] as they are now."""
        return self.scale * self.stretch.exp()

    @torch.no_grad()
    def weight(self) -> Tensor:
        """Ŵ [N, K], as the block takes it."""
        begun, kept = self.begun, self.start.kept
        rounded = torch.ops.mmqc.learned_round(begun, self.offset, self.step(), self.zero, self.start.bits, self.start.dtype)
        weight = self.whole(rounded)
        return weight if kept is None else weight.index_copy(1, kept[0], kept[1].to(weight.dtype))

    @torch.no_grad()
    def take(self, of_weight: Tensor) -> None:
        """The gradients of what is learned from that of Ŵ, float32 [N, K]; an offset's is zero where it leaves the grid."""
        if self.start.kept is not None:
            of_weight = of_weight.index_fill(1, self.start.kept[0], 0)
        rest = grouped(of_weight, self.start.solved.group_size).flatten(0, 1).contiguous()
        operands = (self.begun, self.offset, self.step(), self.zero, rest)
        self.offset.grad, self.stretch.grad = torch.ops.mmqc.learned_round_gradients(*operands, self.start.bits)

    @torch.no_grad()
    def solved(self) -> Quantized:
        """Codes and scales as they are now."""
        solved = self.start.solved
        codes = (self.begun + self.offset).round_().clamp_(*levels(self.start.bits))
        return replace(solved, codes=self.whole(codes.to(torch.int8)).contiguous(), scale=self.step().reshape(solved.scale.shape))


@contextmanager
def holding(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """A module whose parameters are ``weights``, by their names within it, for the length of a ``with`` block; tied ones too."""
    places = [(owner, name, p) for owner in module.modules() for name, p in owner._parameters.items()]
    given = {id(module.get_parameter(name)): weight for name, weight in weights.items()}
    try:
        for owner, name, p in places:
            if id(p) in given:
                owner._parameters[name] = given[id(p)]  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for owner, name, p in places:
            owner._parameters[name] = p


def learn(
    starts: Mapping[str, Start], held: Held, loss: BatchLoss, batches: Sequence[int], steps: int
) -> tuple[dict[str, Quantized], float, float]:
    """The weights, the loss that they started with, and the one that they ended with.

    Args:
        starts: by a name of each weight.
        held: of weights by these names, each in its dtype: in its ``with`` block ``loss`` is theirs.
        loss: of the batch of a number, differentiable; summed over batches.
        batches: their numbers.
        steps: of gradient descent; 0 changes nothing.
    """
    roundings = {name: Rounding(start) for name, start in starts.items()}
    offsets, stretches = ([getattr(r, part) for r in roundings.values()] for part in ("offset", "stretch"))
    rates = [{"params": offsets, "lr": OFFSET_RATE}, {"params": stretches, "lr": STRETCH_RATE}]
    optimizer = torch.optim.Adam(rates, fused=offsets[0].is_cuda or None)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(steps, 1))
    best, first = None, _total({name: start.weight() for name, start in starts.items()}, held, loss, batches)
    least, watched = torch.inf, list(batches)[:: max(1, -(-len(batches) // LOOKED_AT))]
    draw, every = random.Random(0), max(1, steps // LOOKS)
    for step in range(1, steps + 1):
        chosen = draw.sample(list(batches), min(BATCHES, len(batches)))
        for rounding, of_weight in zip(roundings.values(), _gradients(roundings, held, loss, chosen), strict=True):
            rounding.take(of_weight)
        optimizer.step()
        optimizer.zero_grad()
        slower.step()
        if step % every == 0 or step == steps:
            found = _total({name: r.weight() for name, r in roundings.items()}, held, loss, watched)
            if found < least:
                least, best = found, {name: r.solved() for name, r in roundings.items()}
    if best is not None:
        weights = {name: replace(start, solved=best[name]).weight() for name, start in starts.items()}
        last = _total(weights, held, loss, batches)
        if last < first:
            return best, first, last
    return {name: start.solved for name, start in starts.items()}, first, first


def _gradients(roundings: Mapping[str, Rounding], held: Held, loss: BatchLoss, batches: Sequence[int]) -> list[Tensor]:
    """The loss's gradients by the weights, in float32."""
    weights = {name: r.weight().requires_grad_() for name, r in roundings.items()}
    leaves = list(weights.values())
    totals: list[Tensor] = []

    def gradients(batch: int) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(loss(batch), leaves)

    with held(weights):
        for parts in map(gradients, batches):
            if totals:
                torch._foreach_add_(totals, parts)
            else:
                totals = [part.to(torch.float32, copy=True, memory_format=torch.contiguous_format) for part in parts]
    return totals


def _total(weights: Mapping[str, Tensor], held: Held, loss: BatchLoss, batches: Sequence[int]) -> float:
    def plain(batch: int) -> Tensor:
        with torch.no_grad():
            return loss(batch).double()

    with held(weights):
        return float(sum(map(plain, batches)))
