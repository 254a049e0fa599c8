"""A linear where the model's class has something else whose weight the rewrites changed: a weight-normed one, a bare product.

    y = x Wᵀ + b

Shapes:  x [*, K]   W [N, K]   b [N] or none
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class PlainLinear(nn.Linear):
    """An ``nn.Linear`` that a checkpoint names, so that loading puts one there too."""

    @classmethod
    def of(cls, linear: nn.Linear) -> PlainLinear:
        """``linear`` itself, hooks and all, as one of this class."""
        linear.__class__ = cls
        assert isinstance(linear, cls)
        return linear

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        return {"in": self.in_features, "out": self.out_features, "bias": self.bias is not None, "dtype": self.weight.dtype}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> PlainLinear:
        """On the meta device."""
        dtype: torch.dtype = spec["dtype"]
        return cls(spec["in"], spec["out"], spec["bias"], device="meta", dtype=dtype)
