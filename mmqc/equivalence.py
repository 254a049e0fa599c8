"""Whether the exact rewrites left the model's function alone: its output on one batch, before and after.

The passes are proved on the recorded graph by data flow.  This looks at the model itself, with the weights that were written
back and the modules that were swapped, before anything is quantized; ``quantize_`` undoes everything if it fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# A wrong rotation changes an output by about its own size; rounding, to the stored dtype too, by far less.  Models in float64
# compute their norms in float32.
BARS = {torch.float64: 1e-4, torch.float32: 1e-2}
HALF = 0.5


class RewriteError(RuntimeError):
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
        known = b.isfinite()
        if b.shape != a.shape or not bool((a.isfinite() == known).all()):
            raise RewriteError(
                f"the rewrites changed an output of shape {tuple(b.shape)} to {tuple(a.shape)}, or to NaN"
            )
        size = float(b[known].double().norm())
        error = float((a[known].double() - b[known].double()).norm()) / size if size else 0.0
        if error > BARS.get(b.dtype, HALF):
            raise RewriteError(
                f"the exact rewrites changed the model's output by {error:.1e} (relative, an output of shape {tuple(b.shape)}); "
                "the model is as it was. Please report it with the model's class, and go on without the rewrites: "
                "config.replace(rewrites=mmqc.Rewrites())"
            )
        worst = max(worst, error)
    return worst
