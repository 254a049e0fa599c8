"""The linear whose inputs are quantized token by token, symmetrically; ``quantize_`` puts it in place of a model's own.

    y = token_matmul(x', w_q, s_w, b)        x' = H x or x, as in nn/linear.py

Shapes:  x [..., K]   w_q int8 or float8 [N, K] or packed uint8 (ops/pack.py)   s_w [N] or [N, K/g]   b [N]   y [..., N] as x

It is what vLLM's linears with dynamic activations compute.  On CUDA a pass over the rows quantizes, and the product is that of
static scales; float8 inputs beside weights in groups, or beside int8 ones, have no kernel and run as the op's reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmqc.nn.integer_weight import PackedLinear
from mmqc.ops import straight_through
from mmqc.ops.pack import pack, packed_width, unpack
from mmqc.ops.weight_only_matmul import dequantize
from mmqc.solvers.quantized import Quantized


class TokenLinear(PackedLinear):
    """A linear of quantized weights with one input scale per token, found in every call.

    All state is plain buffers: ``qweight``, ``weight_scale`` and, where there is one, ``bias``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        weight_bits: int,
        group_size: int = 0,
        bias: bool = False,
        hadamard: int = False,
        float8: bool = False,
        float8_weight: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        """The structure without values, to load a state dict into; ``float8_weight``: of 8 bits, beside float8 inputs."""
        super().__init__(
            in_features,
            out_features,
            weight_bits=weight_bits,
            activation_bits=8,
            group_size=group_size,
            hadamard=hadamard,
            dtype=dtype,
            device=device,
        )
        if float8_weight and (not float8 or weight_bits != 8 or group_size):
            raise ValueError("float8 weights have 8 bits, no groups, and float8 inputs")
        self.float8, self.float8_weight = float8, float8_weight
        groups = (out_features, -(-in_features // group_size)) if group_size else (out_features,)
        stored = torch.uint8 if self.storage_bits != 8 else self.code_dtype if float8_weight else torch.int8
        layout = {
            "qweight": ((out_features, packed_width(in_features, self.storage_bits)), stored),
            "weight_scale": (groups, torch.float32),
            "bias": ((out_features,), dtype) if bias else None,
            "input_scale": None,
            "outlier_index": None,
        }
        self._allocate(layout, device)

    @classmethod
    def from_parts(
        cls,
        quantized: Quantized,
        *,
        weight_bits: int,
        bias: Tensor | None = None,
        hadamard: int = False,
        float8: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> TokenLinear:
        """From a solved weight without zero points, whose codes are packed here if they fit 4 bits; the other parts are kept."""
        if quantized.zero is not None:
            raise ValueError("weights beside inputs quantized by token are symmetric")
        n, k = quantized.codes.shape
        module = cls(
            k,
            n,
            weight_bits=weight_bits,
            group_size=quantized.group_size,
            bias=bias is not None,
            hadamard=hadamard,
            float8=float8,
            float8_weight=quantized.codes.is_floating_point(),
            dtype=dtype,
            device="meta",
        )
        bits = module.storage_bits
        codes = quantized.codes if bits == 8 else pack(quantized.codes, bits)
        module._fill({"qweight": codes, "weight_scale": quantized.scale.float(), "bias": bias})
        return module

    @property
    def scheme(self) -> str:
        """E.g. W4A8-g128-fp8-token."""
        return f"{super().scheme}-token"

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        spec = super().to_spec()
        del spec["activation_bits"]
        return {**spec, "float8": self.float8, "float8_weight": self.float8_weight, "dtype": self.float_dtype}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> TokenLinear:
        """On the meta device."""
        names = ("weight_bits", "group_size", "bias", "hadamard", "float8", "float8_weight", "dtype")
        return cls(spec["in"], spec["out"], **{name: spec[name] for name in names}, device="meta")

    def codes(self) -> Tensor:
        """The int8 or float8 codes [N, K]."""
        return unpack(self.qweight, self.in_features, self.storage_bits)

    @property
    def weight(self) -> Tensor:
        """The float weight [N, K] that the codes stand for, computed at every access."""
        w = dequantize(self.qweight, self.weight_scale, self.in_features, self.storage_bits, self.group_size, torch.float32)
        return self._unrotated(w)

    def forward(self, x: Tensor) -> Tensor:
        """The formula at the top of the file."""
        x, bits, code = self.rotated(x), self.storage_bits, self.code_dtype if self.float8 else None
        y = torch.ops.mmqc.token_matmul(x, self.qweight, self.weight_scale, self.bias, bits, self.group_size, code)
        return straight_through.linear(x, y, [self.qweight], [self.weight_scale], [self.in_features], [bits], self.group_size)

    def extra_repr(self) -> str:
        """Sizes and scheme."""
        return f"{self.in_features}, {self.out_features}, {self.scheme}, bias={self.bias is not None}, hadamard={self.hadamard}"
