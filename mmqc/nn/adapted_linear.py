"""A linear of the model's with low-rank terms beside it; ``load_adapter`` puts it in the place of the linear.

    y = L(x) + sum over adapters of  B (A x) + c

Shapes:  x [..., K]   A [r, K]   B [N, r], the adapter's factor s in it   c [N] or none   y [..., N]
Why:     what an adapter learned is far below a step of 4 bits: added to the codes it would be rounded away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BASE = "base"  # the child's name


class LowRank(nn.Module):
    """B (A x) + c, in A's dtype."""

    bias: nn.Parameter | None

    def __init__(self, down: Tensor, up: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down, requires_grad=False), nn.Parameter(up, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return F.linear(F.linear(x.to(self.down.dtype), self.down), self.up, self.bias)

    def extra_repr(self) -> str:
        """Sizes."""
        return f"{self.down.shape[1]}, {self.up.shape[0]}, rank={self.down.shape[0]}, bias={self.bias is not None}"


class AdaptedLinear(nn.Module):
    """The formula at the top of the file.  What model code asks the linear (``weight.dtype``, sizes) its base answers.

    Attributes:
        base: the linear, quantized or not.
        terms: ``LowRank`` by the adapter's name.
    """

    base: nn.Module

    def __init__(self, base: nn.Module, terms: Mapping[str, LowRank]) -> None:
        super().__init__()
        self.base, self.terms = base, nn.ModuleDict(dict(terms))

    @property
    def in_features(self) -> int:
        """K."""
        return self._asked("in_features")

    @property
    def out_features(self) -> int:
        """N."""
        return self._asked("out_features")

    @property
    def weight(self) -> Tensor:
        """W [N, K] of the base alone."""
        return self._asked("weight")

    @property
    def bias(self) -> Tensor | None:
        """b [N] of the base alone."""
        return self._asked("bias")

    def _asked(self, name: str) -> Any:
        return getattr(self.base, name)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N], in the base's dtype."""
        y = self.base(x)
        for term in self.terms.values():
            y = y + term(x).to(y.dtype)
        return y

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values; its base has a spec of its own, or is the class's."""
        terms = [term for term in self.terms.values() if isinstance(term, LowRank)]
        return {
            "in": terms[0].down.shape[1],
            "out": terms[0].up.shape[0],
            "names": list(self.terms),
            "widths": [term.down.shape[0] for term in terms],
            "biases": [term.bias is not None for term in terms],
            "dtype": terms[0].down.dtype,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> AdaptedLinear:
        """On the meta device, around nothing: whoever puts it into a model gives it what was there."""
        empty = {"dtype": spec["dtype"], "device": "meta"}
        terms = {}
        for name, rank, bias in zip(spec["names"], spec["widths"], spec["biases"], strict=True):
            down, up = torch.empty(rank, spec["in"], **empty), torch.empty(spec["out"], rank, **empty)
            terms[name] = LowRank(down, up, torch.empty(spec["out"], **empty) if bias else None)
        return cls(nn.Identity(), terms)
