"""Whether the exact rewrites left the model's function alone: its output on one batch, before and after.

The passes are proved on the recorded graph by data flow.  This looks at the model itself, with the weights that were written
back and the modules that were swapped, before anything is quantized; ``quantize_`` undoes everything if it fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mmqc.errors import MmqcError

# A wrong rotation changes an output by about its own size; rounding, to the stored dtype too, by far less.  Models in float64
# compute their norms in float32.
BARS = {torch.float64: 1e-4, torch.float32: 1e-2}
HALF = 0.5
PART = 1 << 22


class RewriteError(MmqcError, RuntimeError):
    """The rewrites changed what the model computes: a bug of mmqc, and nothing was changed."""


@torch.no_grad()
def outputs(model: nn.Module, batch: Mapping[str, Any]) -> list[Tensor]:
    """The logits, or the floating-point tensors of a model's output that has none (others beside logits may be rotated)."""
    output = model(**batch)
    if isinstance(output, Mapping):
        output = output["logits"] if "logits" in output else dict(output)
    return [t.detach().clone() for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def check(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest relative difference ‖a - b‖ / ‖b‖ of two outputs, over all their tensors.

    Raises:
        RewriteError: it is more than rounding explains.
    """
    worst = 0.0
    for b, a in zip(before, after, strict=True):
        size, error = _sizes(b, a)
        error = error / size if size else 0.0
        if error > BARS.get(b.dtype, HALF):
            raise RewriteError(
                f"the exact rewrites changed the model's output by {error:.1e} (relative, an output of shape {tuple(b.shape)}); "
                "the model is as it was. Please report it with the model's class, and go on without the rewrites: "
                "config.replace(rewrites=mmqc.Rewrites())"
            )
        worst = max(worst, error)
    return worst


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
