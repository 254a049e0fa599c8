"""The modules that ``quantize_`` puts in place of a model's own; the quantized linear lives here.

    static     y = scaled_matmul(quantize(x', s_x), w_q, s_x, s_w, t) + b     x' = H x or x
    weight     y = weight_only_matmul(x', w_q, s_w, z_w) + b
    both       y += x'[..., S] w_Sᵀ   for the rank-r term of MQuant's rotation magnitude suppression (section 4.3)

Shapes:  x [..., K]   w_q int8 (float8 beside such inputs) [N, K] or packed uint8 (ops/pack.py)
         s_w [N] or [N, K/g]   s_x [1] or [2] = (text, visual)
         t int32 [N, K/g], integer group scales (s_w [N] then), or none   z_w int8 or float16 like s_w, or none
         S int64 [r]   w_S [N, r]   (w_q holds zeros in the columns S)   y [..., N] in x's dtype

Model code that looks at ``linear.weight.dtype`` to cast its activations, or reads the matrix, sees the float weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc import kernels
from mmqc.nn.integer_weight import PackedLinear, kind_of_zero, zero_dtype
from mmqc.nn.modality import ModalityContext
from mmqc.nn.norm import RMSNorm
from mmqc.nn.online_hadamard import HadamardLinear, rebuild_factors
from mmqc.ops import nonfinite, straight_through
from mmqc.ops.pack import pack, packed_width, unpack
from mmqc.ops.weight_only_matmul import dequantize
from mmqc.solvers.quantized import Quantized

__all__ = ["HadamardLinear", "QuantLinear", "RMSNorm", "rebuild_factors"]

kernels.install()


class QuantLinear(PackedLinear):
    """A linear with an integer weight and, if ``activation_bits`` is set, statically quantized inputs.

    All state is plain buffers: ``qweight``, ``weight_scale`` and, where they apply, ``weight_zero``, ``bias``,
    ``input_scale``, ``group_scale``, ``outlier_index``, ``outlier_weight``.  ``modality`` is the model's ModalityContext,
    needed iff ``input_scale`` has two entries.
    """

    weight_zero: Tensor | None
    group_scale: Tensor | None
    outlier_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        weight_bits: int,
        activation_bits: int | None = None,
        group_size: int = 0,
        bias: bool = False,
        input_scales: int = 0,
        outliers: int = 0,
        hadamard: int = False,
        zero: bool | Literal["float"] = False,
        integer_scales: bool | Literal["int8"] = False,
        float8: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        """The structure without values, to load a state dict into; ``dtype`` is that of bias and outlier weights."""
        super().__init__(
            in_features,
            out_features,
            weight_bits=weight_bits,
            activation_bits=activation_bits,
            group_size=group_size,
            hadamard=hadamard,
            dtype=dtype,
            device=device,
        )
        if float8 and (activation_bits != 8 or group_size):
            raise ValueError("float8 is for static activations of 8 bits and weights without groups")
        if integer_scales and (not input_scales or not group_size):
            raise ValueError("integer scales are those of groups, of a linear with quantized inputs")
        if bool(input_scales) != (activation_bits is not None):
            raise ValueError("a static linear has input_scale and activation_bits, a weight-only one has neither")
        self.float8 = float8
        self.modality: ModalityContext | None = None
        stored = self.code_dtype if self.storage_bits == 8 else torch.uint8
        rows = (out_features,)
        groups = (out_features, -(-in_features // group_size)) if group_size else rows
        layout = {
            "qweight": ((out_features, packed_width(in_features, self.storage_bits)), stored),
            "weight_scale": (rows if integer_scales else groups, torch.float32),
            "weight_zero": (groups, zero_dtype(zero)) if zero else None,
            "group_scale": (groups, torch.int8 if integer_scales == "int8" else torch.int32) if integer_scales else None,
            "bias": (rows, dtype) if bias else None,
            "input_scale": ((input_scales,), torch.float32) if input_scales else None,
            "outlier_index": ((outliers,), torch.int64) if outliers else None,
            "outlier_weight": ((out_features, outliers), dtype) if outliers else None,
        }
        self._allocate(layout, device)

    @classmethod
    def from_parts(
        cls,
        quantized: Quantized,
        *,
        weight_bits: int,
        activation_bits: int | None = None,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        outliers: tuple[Tensor, Tensor] | None = None,
        hadamard: int = False,
        modality: ModalityContext | None = None,
        dtype: torch.dtype = torch.float32,
        float8: bool = False,
    ) -> QuantLinear:
        """From a solved weight, whose codes are packed here if they fit 4 bits, and the other parts, which it keeps.

        Integer scales are stored as such beside quantized inputs, else as the floats that they stand for.
        ``outliers``: the input channels in higher precision, int64 [r], and their weights [N, r].
        """
        out_features, in_features = quantized.codes.shape
        group_scale, weight_scale = None, quantized.scale
        if quantized.integer and input_scale is not None:
            group_scale, weight_scale = quantized.integer_scales()
        index, columns = outliers or (None, None)
        module = cls(
            in_features,
            out_features,
            weight_bits=weight_bits,
            activation_bits=activation_bits,
            group_size=quantized.group_size,
            input_scales=_length(input_scale),
            hadamard=hadamard,
            integer_scales=_integer_scales(group_scale),
            float8=float8,
            dtype=dtype,
            device="meta",
        )
        bits = module.storage_bits
        parts = {
            "qweight": quantized.codes.to(module.code_dtype) if bits == 8 else pack(quantized.codes, bits),
            "weight_scale": weight_scale.float(),
            "weight_zero": quantized.zero,
            "group_scale": group_scale,
            "bias": bias,
            "input_scale": None if input_scale is None else input_scale.float(),
            "outlier_index": index,
            "outlier_weight": columns,
        }
        module._fill(parts)
        module.modality = modality
        return module

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        return {
            **super().to_spec(),
            "integer_scales": _integer_scales(self.group_scale),
            "input_scales": _length(self.input_scale),
            "outliers": _length(self.outlier_index),
            "zero": kind_of_zero(self.weight_zero),
            "float8": self.float8,
            "modality": self.modality is not None,
            "dtype": self.float_dtype,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> QuantLinear:
        """On the meta device; its modality is attached with the model's."""
        always = ("weight_bits", "activation_bits", "group_size", "hadamard", "bias", "input_scales", "outliers", "dtype")
        later = ("integer_scales", "zero", "float8")  # models saved before there were any lack them
        options = {name: spec[name] for name in always} | {name: spec.get(name, False) for name in later}
        return cls(spec["in"], spec["out"], **options, device="meta")

    def codes(self) -> Tensor:
        """The int8 or float8 codes [N, K]."""
        return unpack(self.qweight, self.in_features, self.storage_bits)

    @property
    def weight(self) -> Tensor:
        """The float weight [N, K] that the codes stand for, computed at every access."""
        w = dequantize(
            self.qweight, self._scales(), self.in_features, self.storage_bits, self.group_size, torch.float32, self.weight_zero
        )
        if self.outlier_index is not None and self.outlier_weight is not None:
            w = w.index_copy(-1, self.outlier_index, self.outlier_weight.float())
        return self._unrotated(w)

    def forward(self, x: Tensor) -> Tensor:
        """The formula at the top of the file.

        Every line is traced for each of a model's linears: no more than it takes.
        """
        if self.hadamard:
            x = self.rotated(x)
        group_size, bits, scale = self.group_size, self.storage_bits, self.input_scale
        if scale is None:
            y = torch.ops.mmqc.weight_only_matmul(x, self.qweight, self.weight_scale, self.bias, bits, group_size, self.weight_zero)
        else:
            visual = None
            if scale.shape[0] != 1:
                scale, visual = self._row_scales(x, scale)
            code = (self.code_dtype,) if self.float8 else ()
            x_q = torch.ops.mmqc.quantize(x, scale, visual, self.activation_bits, *code)
            grouped: Any = (self.group_scale, group_size) if group_size else ()
            y = torch.ops.mmqc.scaled_matmul(
                x_q, self.qweight, scale, self.weight_scale, self.bias, visual, bits, x.dtype, *grouped
            )
            if torch.is_grad_enabled() and x.requires_grad:
                y = straight_through.linear(x, y, [self.qweight], [self._scales()], [self.in_features], [bits], group_size)
            if nonfinite.propagating:
                y = nonfinite.poisoned(y, x)
        if self.outlier_index is not None and self.outlier_weight is not None:
            y = y + F.linear(x.index_select(-1, self.outlier_index), self.outlier_weight.to(x.dtype))
        return y

    def _scales(self) -> Tensor:
        """The scales as floats, [N] or [N, ceil(K/g)]."""
        return self.weight_scale if self.group_scale is None else self.weight_scale[:, None] * self.group_scale

    def _row_scales(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.modality is None:
            raise RuntimeError("this linear has one input scale per modality and no ModalityContext: attach one to its model")
        visual = self.modality.rows(x)
        return (scale[:1], None) if visual is None else (scale, visual)

    def extra_repr(self) -> str:
        """Sizes and scheme."""
        scheme = self.scheme + ("" if self.group_scale is None else "-i")
        extras = [f"bias={self.bias is not None}"]
        if self.input_scale is not None:
            extras.append(f"input_scales={self.input_scale.shape[0]}")
        if self.hadamard:
            extras.append(f"hadamard={self.hadamard}")
        if self.outlier_index is not None:
            extras.append(f"outliers={self.outlier_index.shape[0]}")
        return f"{self.in_features}, {self.out_features}, {scheme}, {', '.join(extras)}"


def _length(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[0]


def _integer_scales(t: Tensor | None) -> bool | Literal["int8"]:
    """Whether there are integer scales; "int8" of those that codes can be multiplied with in 8 bits."""
    return "int8" if t is not None and t.dtype == torch.int8 else t is not None
