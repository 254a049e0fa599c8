"""A linear that multiplies its input by a Hadamard matrix first: y = W (H x) + b.

H is one matrix, or the same one in several blocks along the diagonal, of which ranks that share the linear have some each.

The factors of a block are buffers that no checkpoint holds: they follow from the width.  They are rebuilt, never rounded, when
the module changes dtype (float32, or float64 in a float64 model), and when weights are loaded over the meta device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.ops.hadamard_matrix import hadamard_factors, part


@functools.lru_cache(maxsize=64)
def _shared(n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The factors of a width, one copy for all modules: a compiled q, k and v then run one transform, not three."""
    return tuple(f.to(device=device, dtype=dtype) for f in hadamard_factors(n))


class OnlineHadamard(nn.Module):
    """Base class: the factors, and what keeps them right.

    Attributes:
        hadamard: in how many blocks it is; True is one, and False none.
    """

    hadamard: int
    in_features: int
    _n_factors: int

    def _init_hadamard(self, blocks: int, device: Any = None, dtype: torch.dtype = torch.float32) -> None:
        self.hadamard = blocks if blocks > 1 else bool(blocks)
        self._n_factors = 0
        if blocks:
            self.rebuild_factors(device or torch.empty(0).device, dtype)

    def rebuild_factors(self, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Compute the factors from the width, e.g. after ``to_empty`` or a loader that knows no such buffers."""
        if not self.hadamard:
            return
        if self._n_factors:
            old: Tensor = self.get_buffer("factor_0")
            device, dtype = device or old.device, dtype or old.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        factors = _shared(part(self.in_features, int(self.hadamard)), torch.device(device), wide)
        self._n_factors = len(factors)
        for i, factor in enumerate(factors):
            if factor.is_meta:  # one of its own: a loader gives every tensor values, but only once
                factor = torch.empty_like(factor)
            self.register_buffer(f"factor_{i}", factor, persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        """H x, or x where the module has no online Hadamard."""
        if not self.hadamard:
            return x
        factors, blocks = [getattr(self, f"factor_{i}") for i in range(self._n_factors)], int(self.hadamard)
        if blocks == 1:
            return torch.ops.mmqc.hadamard(x, factors)
        return torch.ops.mmqc.hadamard(x.unflatten(-1, (blocks, -1)), factors).flatten(-2)

    def keep_blocks(self, ranks: int) -> None:
        """Leave the blocks of one of so many ranks; the width is the caller's affair."""
        self.hadamard = self.hadamard // ranks if self.hadamard > ranks else True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OnlineHadamard:
        before = self.get_buffer("factor_0") if self._n_factors else None
        super()._apply(fn, recurse)
        if before is not None:
            after = self.get_buffer("factor_0")
            if (after.dtype, after.device) != (before.dtype, before.device):
                self.rebuild_factors()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        weight = _weight(self)
        if self._n_factors and self.get_buffer("factor_0").device != weight.device:
            self.rebuild_factors(weight.device)


def _weight(module: nn.Module) -> Tensor:
    return module.get_parameter("weight") if "weight" in module._parameters else module.get_buffer("qweight")


def rebuild_factors(model: nn.Module) -> None:
    """Recompute every online Hadamard of ``model`` on its linear's device, for loaders that only fill checkpoint tensors.

    Where the linear's values are left on disk, they stay on the device that it runs on: no file holds them.
    """
    for module in model.modules():
        if isinstance(module, OnlineHadamard) and module.hadamard:
            weight = _weight(module)
            module.rebuild_factors(None if weight.is_meta else weight.device)


class HadamardLinear(OnlineHadamard):
    """A float linear behind an online Hadamard; its parameters keep ``nn.Linear``'s names."""

    _hf_quantized_needs_local_tp = True  # of ranks that share it each computes with plain tensors: our op knows no DTensor
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None, blocks: int = 1
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None)
        self._init_hadamard(blocks, self.weight.device, self.weight.dtype)

    @classmethod
    def from_parts(cls, weight: Tensor, bias: Tensor | None, blocks: int = 1) -> HadamardLinear:
        """From W Hᵀ [N, K] and b [N], H in so many blocks."""
        out_features, in_features = weight.shape
        module = cls(in_features, out_features, bias=bias is not None, device="meta", dtype=weight.dtype, blocks=blocks)
        module.weight = nn.Parameter(weight, requires_grad=weight.requires_grad)
        if bias is not None:
            module.bias = nn.Parameter(bias, requires_grad=bias.requires_grad)
        module.rebuild_factors(weight.device)
        return module

    def forward(self, x: Tensor) -> Tensor:
        """W (H x) + b."""
        return nn.functional.linear(self.rotated(x), self.weight, self.bias)

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        spec = {"in": self.in_features, "out": self.out_features, "bias": self.bias is not None, "dtype": self.weight.dtype}
        return spec | ({"hadamard": self.hadamard} if self.hadamard > 1 else {})

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> HadamardLinear:
        """On the meta device."""
        blocks = spec.get("hadamard", 1)
        return cls(spec["in"], spec["out"], bias=spec["bias"], dtype=spec["dtype"], device="meta", blocks=blocks)

    def extra_repr(self) -> str:
        """nn.Linear's."""
        blocks = f", blocks={self.hadamard}" if self.hadamard > 1 else ""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{blocks}"


def hadamard_of(linear: nn.Module) -> int:
    """What a linear that takes the place of this one has: its blocks, or False."""
    return linear.hadamard if isinstance(linear, HadamardLinear) else False
