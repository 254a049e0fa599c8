"""RMSNorm of the form that folded norms take.

    y = x / sqrt(mean(x²) + eps) [∘ g]

Shapes:  x [..., D]   g [D] or none (unit gain)
Why:     after LayerNorm's mean is folded into its writers and its gain into its readers, this is all that is left of it.
Exact:   computed in float32 at least, float64 for float64 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x), with a gain only if one is given."""

    weight: nn.Parameter | None

    def __init__(self, width: int, eps: float = 1e-6, weight: Tensor | None = None):
        super().__init__()
        self.width, self.eps = width, eps
        self.register_parameter(
            "weight", None if weight is None else nn.Parameter(weight, requires_grad=weight.requires_grad)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.to(y.dtype)
        return y.to(x.dtype).contiguous()  # as F.layer_norm's: some callers go on with view()

    def extra_repr(self) -> str:
        """Width, eps and gain."""
        return f"{self.width}, eps={self.eps}, gain={self.weight is not None}"
