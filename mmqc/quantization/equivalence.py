"""Whether the exact rewrites left the model's function alone: its outputs on several batches, before and after.

The passes are proved on the recorded graph by data flow.  This looks at the model itself, with the weights that were written
back and the modules that were swapped, before anything is quantized; ``quantize_`` undoes everything if it fails.

    ‖after - before‖ <= max(floor, 4 noise) ‖before‖

The floor follows the precision that the model computes in.  Beyond it counts what the model itself makes of rounding: the
noise is the distance to its own output with its parameters, the small ones first, moved by half a unit in their last place.
(Rotations of 44 architectures in bfloat16 moved the output by 0.1 to 2.4 times that of biases and gains alone, 1.1 times in
the median; in float32 likewise.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.errors import MmqcError
from mmqc.graph.program import Program
from mmqc.quantization.full_precision import full_float32
from mmqc.quantization.handed import Handed

FLOORS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TIMES, DRAWS = 4, 8
PART = 1 << 22
MOVED = 1 << 24


class RewriteError(MmqcError, RuntimeError):
    """The rewrites changed what the model computes: a bug of mmqc, and nothing was changed."""


@dataclass(frozen=True)
class Before:
    """What a model answered: a rank's calls, the floats of each call's output, and what some of its modules were handed."""

    calls: Sequence[Mapping[str, Any]]
    outputs: Sequence[Sequence[Tensor]]
    handed: Handed

    @classmethod
    def of(cls, model: nn.Module, calls: Sequence[Mapping[str, Any]], frames: Iterable[str] = ()) -> Before:
        """Call the model."""
        handed = Handed(model, frames)
        with handed.watched(after=False):
            return cls(calls, [outputs(model, call) for call in calls], handed)


@torch.no_grad()
def outputs(model: nn.Module, batch: Mapping[str, Any]) -> list[Tensor]:
    """The logits, or the floating-point tensors of a model's output that has none (others beside logits may be rotated)."""
    with full_float32():
        output = model(**batch)
    if isinstance(output, Mapping):
        output = output["logits"] if "logits" in output else dict(output)
    return [t.detach().clone() for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def precision(prog: Program) -> torch.dtype:
    """The coarsest dtype that the recorded model computes in: models in float64 often have their norms in float32."""
    found = {node.meta.get("dtype") for node in prog.graph.nodes if node.op in ("call_function", "call_method")}
    return max((d for d in FLOORS if d in found), key=lambda d: torch.finfo(d).eps, default=torch.float32)


def check(model: nn.Module, before: Before, dtype: torch.dtype, ranks: Ranks = ALONE) -> float:
    """The largest relative difference ‖a - b‖ / ‖b‖ of the model's outputs now from those ``before``, over all calls and tensors.

    Each of several ranks makes its calls; all of them judge all calls, in one order.

    Raises:
        RewriteError: it is more than rounding to ``dtype`` explains.
    """
    worst, bar = 0.0, FLOORS[dtype]
    own: list[tuple[float, tuple[int, ...], int, int]] = []
    for call, known in zip(before.calls, before.outputs, strict=True):
        with before.handed.watched(after=True):
            own.append((*_largest(known, outputs(model, call)), ranks.rank, len(own)))
    for error, shape, owner, number in ranks.collected(own):
        noises = _noises(model, before.calls[number], dtype) if owner == ranks.rank else iter(())
        while error > bar and (noise := ranks.shared(lambda noises=noises: next(noises, None), owner)) is not None:
            bar = max(bar, TIMES * noise)
        if error > bar:
            raise RewriteError(
                f"the exact rewrites changed the model's output by {error:.1e} (relative, an output of shape {shape}; rounding "
                f"explains {bar:.1e}); the model is as it was. Please report it with the model's class, and go on without the "
                "rewrites: config.replace(rewrites=mmqc.Rewrites())"
            )
        worst = max(worst, error)
    return worst


def _noises(model: nn.Module, call: Mapping[str, Any], dtype: torch.dtype) -> Iterator[float]:
    """How far the output moves when parameters do by half a unit in their last place: each draw may send a token elsewhere."""
    now = outputs(model, call)
    for seed in range(DRAWS):
        with _moved(model, torch.finfo(dtype).eps / 2, seed):
            moved = outputs(model, call)
        yield _largest(now, moved)[0]


@contextmanager
def _moved(model: nn.Module, by: float, seed: int) -> Iterator[None]:
    """Parameters, the smallest first and ``MOVED`` numbers at most, times 1 + N(0, by²) meanwhile; what is offloaded stays."""
    draw = torch.Generator().manual_seed(seed)
    floats = sorted((p for p in model.parameters() if p.is_floating_point() and not p.is_meta), key=Tensor.numel)
    ends = itertools.accumulate(p.numel() for p in floats)
    moved = [p for p, end in zip(floats, ends, strict=True) if end <= MOVED or p.dim() == 1]
    kept = [p.detach().clone() for p in moved]
    try:
        for p in moved:
            factor = 1 + by * torch.randn(p.shape, generator=draw, dtype=torch.float64)
            p.data.copy_(p.detach().cpu().double() * factor)
        yield
    finally:
        for p, value in zip(moved, kept, strict=True):
            p.data.copy_(value)


def _largest(before: Sequence[Tensor], after: Sequence[Tensor]) -> tuple[float, tuple[int, ...]]:
    """The largest relative difference of two lists of tensors, and the shape of the one that has it."""
    found: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for b, a in zip(before, after, strict=True):
        size, error = _sizes(b, a)
        found.append((error / size if size else 0.0, tuple(b.shape)))
    return max(found)


def _sizes(b: Tensor, a: Tensor) -> tuple[float, float]:
    """‖b‖ and ‖a - b‖ of the finite values, in float64, part by part: logits of a long batch would be gigabytes."""
    size = error = 0.0
    same = b.shape == a.shape
    for before, after in zip(b.reshape(-1).split(PART), a.reshape(-1).split(PART), strict=True) if same else ():
        known = before.isfinite()
        same = same and bool((after.isfinite() == known).all())
        before, after = (torch.where(known, t, 0).double() for t in (before, after))
        size += float(before.square().sum())
        error += float((after - before).square().sum())
    if not same:
        raise RewriteError(f"the rewrites changed an output of shape {tuple(b.shape)} to {tuple(a.shape)}, or to NaN")
    return math.sqrt(size), math.sqrt(error)
