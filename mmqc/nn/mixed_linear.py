"""The linear with dynamic activations, in one or several precisions; ``quantize_`` puts it in place of a model's own.

    y = mixed_matmul(quantize_per_token(H x, order, K_p, bits), w_q, s_w, c) + b        H x or x, as in nn/linear.py

Shapes:  x [..., K]   w_q one int8 [N, K_p] or packed uint8 a part (ops/pack.py)   s_w float32 [N, P]   c int32 [N, P]   b [N]
         order int64 [K], the channels part after part, or none   y [..., N] in x's dtype
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmqc.nn.integer_weight import PackedLinear
from mmqc.ops import straight_through
from mmqc.ops.pack import packed_width, unpack
from mmqc.ops.quantize_per_token import check_parts


class MixedLinear(PackedLinear):
    """A linear of integer weights whose inputs are quantized token by token, part by part.

    All state is plain buffers: ``qweight`` and, for further parts, ``qweight_1``, ...; ``weight_scale``, ``weight_sum`` and,
    where they apply, ``order`` and ``bias``.
    """

    weight_sum: Tensor
    order: Tensor | None

    def __init__(
        self,
        out_features: int,
        *,
        widths: Sequence[int],
        stored: Sequence[int],
        activation: Sequence[int],
        weight_bits: int,
        hadamard: int = False,
        order: bool = False,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        """The structure without values, to load a state dict into."""
        check_parts(sum(widths), widths, activation)
        super().__init__(
            sum(widths),
            out_features,
            weight_bits=weight_bits,
            activation_bits=activation[0],
            group_size=0,
            hadamard=hadamard,
            dtype=dtype,
            device=device,
        )
        self.widths, self.stored, self.activation = list(widths), list(stored), list(activation)
        parts = zip(self._names(), widths, stored, strict=True)
        codes = {n: ((out_features, packed_width(w, b)), torch.int8 if b == 8 else torch.uint8) for n, w, b in parts}
        scales = (out_features, len(widths))
        layout = {
            **codes,
            "weight_scale": (scales, torch.float32),
            "weight_sum": (scales, torch.int32),
            "order": ((self.in_features,), torch.int64) if order else None,
            "bias": ((out_features,), dtype) if bias else None,
            "input_scale": None,
            "outlier_index": None,
        }
        self._allocate(layout, device)

    @property
    def qweights(self) -> list[Tensor]:
        """The stored codes of every part."""
        return [self.get_buffer(name) for name in self._names()]

    def _names(self) -> list[str]:
        return ["qweight", *(f"qweight_{p}" for p in range(1, len(self.widths)))]

    @classmethod
    def from_stored(
        cls,
        codes: Sequence[Tensor],
        scale: Tensor,
        total: Tensor,
        *,
        order: Tensor | None = None,
        bias: Tensor | None = None,
        **options: Any,
    ) -> MixedLinear:
        """From the codes of every part as they are stored, s_w and c, which it keeps; ``options`` are the constructor's."""
        module = cls(len(scale), **options, device="meta")
        parts = dict(zip(module._names(), codes, strict=True))
        module._fill({**parts, "weight_scale": scale.float(), "weight_sum": total, "order": order, "bias": bias})
        return module

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        return {
            "out": self.out_features,
            "widths": self.widths,
            "stored": self.stored,
            "activation": self.activation,
            "weight_bits": self.weight_bits,
            "hadamard": self.hadamard,
            "order": self.order is not None,
            "bias": self.bias is not None,
            "dtype": self.float_dtype,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> MixedLinear:
        """On the meta device."""
        names = ("widths", "stored", "activation", "weight_bits", "hadamard", "order", "bias", "dtype")
        return cls(spec["out"], **{name: spec[name] for name in names}, device="meta")

    def codes(self) -> Tensor:
        """The int8 codes [N, K], part after part."""
        stored = zip(self.qweights, self.widths, self.stored, strict=True)
        return torch.cat([unpack(w, width, bits) for w, width, bits in stored], 1)

    @property
    def weight(self) -> Tensor:
        """The float weight [N, K] that the codes stand for, computed at every access."""
        widths = torch.tensor(self.widths, device=self.weight_scale.device)
        w = self.codes().float() * self.weight_scale.repeat_interleave(widths, 1)
        if self.order is not None:
            w = torch.empty_like(w).index_copy_(1, self.order, w)
        return self._unrotated(w)

    def forward(self, x: Tensor) -> Tensor:
        """The formula at the top of the file."""
        x = self.rotated(x)
        x_q, scale, offset = torch.ops.mmqc.quantize_per_token(x, self.order, self.widths, self.activation)
        y = torch.ops.mmqc.mixed_matmul(
            x_q, scale, offset, self.qweights, self.weight_scale, self.weight_sum, self.bias, self.widths, self.stored, x.dtype
        )
        scales = self.weight_scale.unbind(1)
        return straight_through.linear(x, y, self.qweights, scales, self.widths, self.stored, order=self.order)

    def extra_repr(self) -> str:
        """Sizes and precisions."""
        parts = enumerate(zip(self.widths, self.stored, self.activation, strict=True))
        high = len(self.widths) - 1 or 1  # the part that may have other bits
        text = " + ".join(f"{width} at W{b if b != 4 and p == high else self.weight_bits}A{a}" for p, (width, b, a) in parts)
        return f"{self.in_features}, {self.out_features}, {text}, bias={self.bias is not None}, hadamard={self.hadamard}"
