"""The linear whose weight alone is quantized, to floats of 4 bits; ``quantize_`` puts it in place of a model's own.

    y = float4_matmul(x', w_q, s, d, b, form)        x' = H x or x, as in nn/linear.py

Shapes:  x [..., K]   w_q uint8 [N, ceil(K/2)]   s uint8 [N, ceil(K/B)]   d float32 [1] or none   b [N]   (ops/float4_matmul.py)
         S int64 [r]   w_S [N, r], input channels in higher precision, as in nn/linear.py   y [..., N] in x's dtype
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmqc.nn.integer_weight import PackedLinear
from mmqc.ops.float4 import check_form, pack_float4, unpack_float4
from mmqc.ops.float4_matmul import dequantize
from mmqc.ops.pack import packed_width
from mmqc.solvers.quantized import Quantized
from mmqc.specs import BLOCKS


class Float4Linear(PackedLinear):
    """A linear with an e2m1 weight in the form "mxfp4" or "nvfp4".

    All state is plain buffers: ``qweight``, ``weight_scale``, the bytes of the scales, and, where they apply,
    ``weight_divisor``, ``bias``, ``outlier_index`` and ``outlier_weight``.
    """

    weight_divisor: Tensor | None
    outlier_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        form: str,
        bias: bool = False,
        hadamard: int = False,
        outliers: int = 0,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        """The structure without values, to load a state dict into; ``dtype`` is that of bias and outlier weights."""
        check_form(form)
        super().__init__(
            in_features,
            out_features,
            weight_bits=4,
            activation_bits=None,
            group_size=BLOCKS[form],
            hadamard=hadamard,
            dtype=dtype,
            device=device,
        )
        self.form = form
        layout = {
            "qweight": ((out_features, packed_width(in_features, 4)), torch.uint8),
            "weight_scale": ((out_features, -(-in_features // self.group_size)), torch.uint8),
            "weight_divisor": ((1,), torch.float32) if form == "nvfp4" else None,
            "bias": ((out_features,), dtype) if bias else None,
            "input_scale": None,
            "outlier_index": ((outliers,), torch.int64) if outliers else None,
            "outlier_weight": ((out_features, outliers), dtype) if outliers else None,
        }
        self._allocate(layout, device)

    @classmethod
    def from_parts(
        cls,
        quantized: Quantized,
        *,
        bias: Tensor | None = None,
        hadamard: int = False,
        outliers: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Float4Linear:
        """From a solved weight, whose codes and scales are packed here, and the other parts, which it keeps."""
        n, k = quantized.codes.shape
        index, columns = outliers or (None, None)
        module = cls(k, n, form=quantized.form, hadamard=hadamard, dtype=dtype, device="meta")
        module._fill(
            {
                "qweight": pack_float4(quantized.codes),
                "weight_scale": quantized.stored_scale(),
                "weight_divisor": quantized.divisor,
                "bias": bias,
                "outlier_index": index,
                "outlier_weight": columns,
            }
        )
        return module

    @classmethod
    def from_stored(
        cls, packed: Tensor, scale: Tensor, divisor: Tensor | None, width: int, form: str, bias: Tensor | None, dtype: torch.dtype
    ) -> Float4Linear:
        """From the tensors that it keeps, as another project's file has them."""
        module = cls(width, packed.shape[0], form=form, dtype=dtype, device="meta")
        module._fill({"qweight": packed, "weight_scale": scale, "weight_divisor": divisor, "bias": bias})
        return module

    @property
    def scheme(self) -> str:
        """E.g. W4A16-nvfp4."""
        return f"W4A16-{self.form}"

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        outliers = 0 if self.outlier_index is None else len(self.outlier_index)
        return {
            "in": self.in_features,
            "out": self.out_features,
            "form": self.form,
            "bias": self.bias is not None,
            "hadamard": self.hadamard,
            "outliers": outliers,
            "dtype": self.float_dtype,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Float4Linear:
        """On the meta device."""
        names = ("form", "bias", "hadamard", "outliers", "dtype")
        return cls(spec["in"], spec["out"], **{name: spec[name] for name in names}, device="meta")

    def codes(self) -> Tensor:
        """Twice the e2m1 numbers, int8 [N, K]."""
        return unpack_float4(self.qweight, self.in_features)

    @property
    def weight(self) -> Tensor:
        """The float weight [N, K] that the codes stand for, computed at every access."""
        w = dequantize(self.qweight, self.weight_scale, self.weight_divisor, self.in_features, self.form, torch.float32)
        if self.outlier_index is not None and self.outlier_weight is not None:
            w = w.index_copy(-1, self.outlier_index, self.outlier_weight.float())
        return self._unrotated(w)

    def forward(self, x: Tensor) -> Tensor:
        """The formula at the top of the file."""
        x = self.rotated(x)
        y = torch.ops.mmqc.float4_matmul(x, self.qweight, self.weight_scale, self.weight_divisor, self.bias, self.form)
        if self.outlier_index is not None and self.outlier_weight is not None:
            y = y + F.linear(x.index_select(-1, self.outlier_index), self.outlier_weight.to(x.dtype))
        return y

    def extra_repr(self) -> str:
        """Sizes and scheme."""
        return f"{self.in_features}, {self.out_features}, {self.scheme}, bias={self.bias is not None}, hadamard={self.hadamard}"
