"""The three forms of an activation scale for ``m`` rows (kernels/row_scale.py): what a launcher takes, and each row's own."""

from typing import Any

import torch
from torch import Tensor

KINDS = ["one", "visual", "row"]


def row_scales(kind: str, m: int, device: Any, low: float = 0.01, high: float = 0.03) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The scale, the launcher's other arguments, and the scale of every row, float32 [m]."""
    draw = lambda n: low + (high - low) * torch.rand(n, device=device)  # noqa: E731
    if kind in ("one", "row"):
        scale = draw(1 if kind == "one" else m)
        return scale, {}, scale.expand(m)
    scale, visual = draw(2), torch.rand(m, device=device) < 0.5
    return scale, {"visual": visual}, torch.where(visual, scale[1], scale[0])
