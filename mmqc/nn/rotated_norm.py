"""A norm at the edge of a rotated space: its gain keeps R out of the weights around it, so R is applied at run time.

    starts a space   y = (n(x) ∘ g) R + β          ends one   y = n(x) Rᵀ ∘ g + β          or both

Shapes:  x, y [..., D]   g, β [D] (β is stored rotated where y is)   R [D, D] orthogonal, never formed
Cost:    D (a1 + ... + ar) multiply-adds a row, once per forward: CLIP's norm in front of its layers, SigLIP's behind them.
R = diag(±1) H, with a reflection behind it where LayerNorms read the space.  It follows from D and a seed: like the factors
of an online Hadamard it is in no checkpoint and is rebuilt, never rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.nn.norm import RMSNorm
from mmqc.nn.online_hadamard import OnlineHadamard
from mmqc.ops.rotate import mean_reflection, random_hadamard, reflect


class RotatedNorm(OnlineHadamard):
    """LayerNorm (``centre``) or RMSNorm with gain and bias.

    ``before`` and ``after`` say for each side whether its rotation keeps means; None means that it is not rotated.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, norm: nn.LayerNorm | RMSNorm, *, seed: int, before: bool | None = None, after: bool | None = None):
        super().__init__()
        assert norm.weight is not None
        self.in_features, self.eps, self.centre = norm.weight.shape[0], norm.eps, isinstance(norm, nn.LayerNorm)
        self.seed, self.before, self.after = seed, before, after
        self.weight = norm.weight
        self.register_parameter("bias", norm.bias)
        self._init_hadamard(True, self.weight.device, self.weight.dtype)

    def rebuild_factors(self, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """The factors of H, the signs, and the vector of the reflection."""
        super().rebuild_factors(device, dtype)
        like = self.get_buffer("factor_0")
        factors, signs = random_hadamard(self.in_features, self.seed)
        self.register_buffer("signs", signs.to(like), persistent=False)
        self.register_buffer("mirror", mean_reflection(factors, signs).to(like), persistent=False)

    def turned(self, x: Tensor, keep_mean: bool, inverse: bool) -> Tensor:
        """X R, or x Rᵀ."""
        factors = [self.get_buffer(f"factor_{i}") for i in range(self._n_factors)]
        signs, mirror = self.get_buffer("signs"), self.get_buffer("mirror")
        if keep_mean and inverse:
            x = reflect(x, mirror)
        x = torch.ops.mmqc.rotate(x, factors, signs, inverse)
        return reflect(x, mirror) if keep_mean and not inverse else x

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.centre:
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.before is not None:
            y = self.turned(y, self.before, inverse=True)
        y = y * self.weight.to(y.dtype)
        if self.after is not None:
            y = self.turned(y, self.after, inverse=False)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype).contiguous()

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        return {
            "size": self.in_features,
            "eps": self.eps,
            "centre": self.centre,
            "bias": self.bias is not None,
            "seed": self.seed,
            "before": self.before,
            "after": self.after,
            "dtype": self.weight.dtype,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> RotatedNorm:
        """On the meta device."""
        if spec["centre"]:
            norm = nn.LayerNorm(spec["size"], spec["eps"], bias=spec["bias"], dtype=spec["dtype"], device="meta")
        else:
            norm = RMSNorm.from_spec({**spec, "weight": True})
        return cls(norm, seed=spec["seed"], before=spec["before"], after=spec["after"])

    def extra_repr(self) -> str:
        """Width, eps and what it does."""
        sides = ", ".join(
            f"{side} (mean kept)" if keep_mean else side
            for side, keep_mean in (("before", self.before), ("after", self.after))
            if keep_mean is not None
        )
        return f"{self.in_features}, eps={self.eps}, centre={self.centre}, bias={self.bias is not None}, rotates {sides}"
