"""RMSNorm of the form that folded norms take.

    y = x / sqrt(mean(x²) + eps) [∘ g] [+ β]

Shapes:  x [..., D]   g, β [D] or none (unit gain, no bias)
Why:     after LayerNorm's mean is folded into its writers and its gain and bias into its readers, this is all that is left
         of it; behind a post-norm, whose readers include the residual, gain and bias stay.
Exact:   computed in float32 at least, float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x), with a gain and a bias only if they are given."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, width: int, eps: float = 1e-6, weight: Tensor | None = None, bias: Tensor | None = None):
        super().__init__()
        self.width, self.eps = width, eps
        for name, value in (("weight", weight), ("bias", bias)):
            given = None if value is None else nn.Parameter(value, requires_grad=value.requires_grad)
            self.register_parameter(name, given)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.to(y.dtype)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype).contiguous()  # as F.layer_norm's: some callers go on with view()

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values; without gain and bias it has no dtype."""
        given = next(self.parameters(), None)
        return {
            "size": self.width,
            "eps": self.eps,
            "weight": self.weight is not None,
            "bias": self.bias is not None,
            "dtype": None if given is None else given.dtype,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> RMSNorm:
        """On the meta device."""
        empty = {"dtype": spec["dtype"], "device": "meta"}
        parts = [torch.empty(spec["size"], **empty) if spec[name] else None for name in ("weight", "bias")]
        return cls(spec["size"], spec["eps"], *parts)

    def extra_repr(self) -> str:
        """Width, eps, gain and bias."""
        return f"{self.width}, eps={self.eps}, gain={self.weight is not None}, bias={self.bias is not None}"
