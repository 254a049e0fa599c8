"""AWQ's search: the factor per input channel that loses least when the weights behind it are rounded to nearest.

    s(α) = mean|x|^α / sqrt(max · min)        duo scaling: mean|x|^α / (mean|w̄|^(1-α) + 1e-4), w̄ = w / max|w| of its group
    α*   = argmin over α of  sum over readers of  tr(D H Dᵀ)        D = Q(W diag(s)) diag(1/s) - W        H = Xᵀ X

Shapes:  W [N, K]    s [n]    H [K, K]    α = 0, 1/20, ..., 19/20
Why:     tr(D H Dᵀ) is the squared error of a reader's output over all tokens that were seen, without running it again.
Source:  Lin et al., arXiv:2306.00978, equations 4 and 5, and their code (grid 20, clamp 1e-4, 1 never tried);
         duo scaling as in LLM Compressor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from mmqc.config import WeightSpec
from mmqc.solvers import rtn
from mmqc.solvers.grid import grouped
from mmqc.solvers.quantized import checked
from mmqc.solvers.second_moment import check_hessian, quadratic
from mmqc.solvers.widest import widest

CHUNK = 1 << 24  # elements of a weight that are rounded at a time: what is in flight beside H
GRID = 20
LEAST = 1e-4


@dataclass(frozen=True)
class Reader:
    """A linear that reads scaled channels.

    Attributes:
        name: FQN of the weight.
        weight: floating point [N, K].
        channel: int64 [K], which of the n channels each column reads; -1 for none.
        hessian: XᵀX [K, K] of its inputs.
        mean_abs: mean|x| [K] of its inputs.
        spec: how it will be quantized.
    """

    name: str
    weight: Tensor
    channel: Tensor
    hessian: Tensor
    mean_abs: Tensor
    spec: WeightSpec


@dataclass(frozen=True)
class Found:
    """What the search chose.

    Attributes:
        scale: float64 [n].
        alpha: the exponent; None where s = 1 stays.
        loss: the readers' squared output error with it.
        plain: the same without any scale.
        refused: the part of ``plain`` that the best scale would have left, where that was too much.
    """

    scale: Tensor
    alpha: float | None
    loss: float
    plain: float
    refused: float | None = None

    def __str__(self) -> str:
        if self.refused is not None:
            return f"no scale: the best one leaves output error x {self.refused:.3f}"
        ratio = self.loss / self.plain if self.plain else 1.0
        return f"alpha {self.alpha:g}, output error x {ratio:.3f}" if self.alpha is not None else "no scale is better"


def search(
    readers: Sequence[Reader],
    width: int,
    *,
    duo: bool = False,
    grid: int = GRID,
    at_most: float = 1.0,
    losses: Callable[[Sequence[Tensor]], Sequence[float]] | None = None,
) -> Found:
    """The best factors for ``width`` channels that ``readers`` read.

    Args:
        readers: linears of one set of channels; each may read a channel several times over, which then has the mean of its
            inputs' magnitudes.
        width: n.
        duo: weigh the inputs' magnitudes against the weights'.
        grid: how many exponents.
        at_most: the part of the loss without any that factors may leave; those that leave more are not taken.
        losses: of several factors float64 [n]; None: the sum of ``reader_loss`` over the readers, for each.

    Raises:
        ValueError: a reader without usable statistics, or weights that are NaN or infinite.
    """
    for r in readers:
        check_hessian(r.hessian, r.weight, r.name, "awq")
    device = readers[0].weight.device
    x = _by_channel([(r.mean_abs, r.channel, 1) for r in readers], width, device)
    w = None
    if duo:  # every row counts the same, whichever reader it is of
        w = _by_channel([(_relative(r.weight, r.spec), r.channel, len(r.weight)) for r in readers], width, device)
    one = torch.ones(width, dtype=torch.float64, device=device)
    tried = list(candidates(x, w, grid))
    measured = [scale for _, scale in tried if not bool((scale == 1).all())]  # without duo scaling the first one is s = 1
    plain, *others = (losses or partial(losses_of, readers))([one, *measured])
    known = dict(zip(map(id, measured), others, strict=True))
    best = Found(one, None, plain, plain)
    for alpha, scale in tried:
        error = known.get(id(scale), plain)
        if error < best.loss or (best.alpha is None and not duo):
            best = Found(scale, alpha, error, plain)
    if at_most < 1 and best.alpha is not None and best.loss > at_most * plain:
        return Found(one, None, plain, plain, best.loss / plain)
    return best


def losses_of(readers: Sequence[Reader], scales: Sequence[Tensor]) -> list[float]:
    """The sum of ``reader_loss`` over the readers, for each of several factors."""
    return [sum(reader_loss(r, scale) for r in readers) for scale in scales]


def candidates(x: Tensor, w: Tensor | None, grid: int) -> Iterator[tuple[float, Tensor]]:
    """(α, s) from the mean magnitudes x [n] of the inputs and, for duo scaling, w [n] of the weights."""
    for i in range(grid):
        alpha = i / grid
        scale = x.pow(alpha) if w is None else x.pow(alpha) / (w.pow(1 - alpha) + LEAST)
        scale = scale.clamp(min=LEAST)
        yield alpha, scale / (scale.max() * scale.min()).sqrt()


def reader_loss(reader: Reader, scale: Tensor) -> float:
    """tr(D H Dᵀ): the squared error of a reader's output if its weight is rounded behind the factors ``scale`` [n]."""
    total = torch.zeros((), dtype=torch.float64, device=reader.weight.device)
    for w in reader.weight.detach().split(max(1, CHUNK // reader.weight.shape[1])):
        rounded = rounded_behind(replace(reader, weight=w), scale)
        d = rounded.sub_(w)
        total += quadratic(reader.hessian.to(d), d.T).sum(dtype=torch.float64)
    return float(total)


def rounded_behind(reader: Reader, scale: Tensor) -> Tensor:
    """Q(W diag(s)) diag(1/s), in float32 at least: a reader's weight, rounded behind the factors ``scale`` [n].

    To the widest grid, as in the authors' search: what clips it comes later.  Symmetric weights of 2 bits are rounded as by rtn
    without its clip: the widest grid has three levels for them, not four, which is another weight than any solver makes.
    """
    w = reader.weight.detach()
    w = w if w.dtype == torch.float64 else w.float()
    channel = reader.channel.to(w.device)
    s = torch.where(channel >= 0, scale[channel.clamp(min=0)], 1.0).to(w)
    scaled, as_rtn = checked(w * s, reader.name), reader.spec.bits == 2 and reader.spec.symmetric
    return (rtn.solve(scaled, reader.spec, clip=False).dequantize() if as_rtn else widest(scaled, reader.spec)).to(w) / s


def _relative(weight: Tensor, spec: WeightSpec) -> Tensor:
    """Mean over rows [K] of |w| relative to the largest of its group."""
    groups = grouped(weight.detach().double().abs(), spec.group_size)
    relative = groups / groups.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return relative.flatten(1)[:, : weight.shape[1]].mean(0)


def _by_channel(columns: list[tuple[Tensor, Tensor, int]], width: int, device: torch.device) -> Tensor:
    """Mean over all columns that are a channel: values [K], channels [K] and a weight -> float64 [width]."""
    total, count = (torch.zeros(width, dtype=torch.float64, device=device) for _ in "tc")
    for values, channel, times in columns:
        there = channel.to(device)
        keep = there >= 0
        total.index_add_(0, there[keep], times * values.to(device, torch.float64)[keep])
        count.index_add_(0, there[keep], torch.full_like(there, times, dtype=torch.float64)[keep])
    return total / count.clamp(min=1)
