"""The modules that ``quantize_`` puts in place of a model's own; the quantized linear lives here.

    static     y = scaled_matmul(quantize(x', s_x), w_q, s_x, s_w, t) + b     x' = H x or x
    weight     y = weight_only_matmul(x', w_q, s_w, z_w) + b
    both       y += x'[..., S] w_Sᵀ   for the rank-r term of MQuant's rotation magnitude suppression (section 4.3)

Shapes:  x [..., K]   w_q int8 (float8 beside such inputs) [N, K] or packed uint8 (ops/pack.py)
         s_w [N] or [N, K/g]   s_x [1] or [2] = (text, visual)
         t int32 [N, K/g], integer group scales (s_w [N] then), or none   z_w int8 like s_w, or none
         S int64 [r]   w_S [N, r]   (w_q holds zeros in the columns S)   y [..., N] in x's dtype

Model code that looks at ``linear.weight.dtype`` to cast its activations, or reads the matrix, sees the float weight.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc import kernels
from mmqc.nn.integer_weight import IntegerWeight
from mmqc.nn.modality import ModalityContext
from mmqc.nn.norm import RMSNorm
from mmqc.nn.online_hadamard import HadamardLinear, rebuild_factors
from mmqc.ops.pack import pack, packed_width, unpack
from mmqc.ops.weight_only_matmul import dequantize
from mmqc.solvers.quantized import Quantized

__all__ = ["HadamardLinear", "QuantLinear", "RMSNorm", "rebuild_factors"]

kernels.install()


class QuantLinear(IntegerWeight):
    """A linear with an integer weight and, if ``activation_bits`` is set, statically quantized inputs.

    All state is plain buffers: ``qweight``, ``weight_scale`` and, where they apply, ``weight_zero``, ``bias``,
    ``input_scale``, ``group_scale``, ``outlier_index``, ``outlier_weight``.  ``modality`` is the model's ModalityContext,
    needed iff ``input_scale`` has two entries.
    """

    qweight: Tensor
    weight_scale: Tensor
    weight_zero: Tensor | None
    group_scale: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None
    outlier_index: Tensor | None
    outlier_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        weight_bits: int,
        activation_bits: int | None,
        group_size: int,
        hadamard: bool,
        device: Any = None,
        dtype: torch.dtype = torch.float32,
        float8: bool = False,
    ):
        super().__init__()
        _check_spec(weight_bits, activation_bits, group_size)
        if float8 and (activation_bits != 8 or group_size):
            raise ValueError("float8 is for static activations of 8 bits and weights without groups")
        self.float8 = float8
        self.float_dtype = dtype  # of the linear that this one stands for
        self.in_features, self.out_features = in_features, out_features
        self.weight_bits, self.activation_bits, self.group_size = weight_bits, activation_bits, group_size
        self.modality: ModalityContext | None = None
        self._init_hadamard(hadamard, device)

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        *,
        weight_bits: int,
        activation_bits: int | None = None,
        group_size: int = 0,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        input_scales: int = 0,
        outliers: int = 0,
        hadamard: bool = False,
        zero: bool = False,
        device: Any = None,
        integer_scales: bool | Literal["int8"] = False,
        float8: bool = False,
    ) -> QuantLinear:
        """The structure without values, to load a state dict into; ``dtype`` is that of bias and outlier weights."""
        module = cls(
            in_features,
            out_features,
            weight_bits=weight_bits,
            activation_bits=activation_bits,
            group_size=group_size,
            hadamard=hadamard,
            device=device,
            dtype=dtype,
            float8=float8,
        )
        stored = module.code_dtype if module.storage_bits == 8 else torch.uint8
        groups = (-(-in_features // group_size),) if group_size else ()

        def buffer(name: str, present: Any, shape: tuple[int, ...], kind: torch.dtype) -> None:
            module.register_buffer(name, torch.empty(shape, dtype=kind, device=device) if present else None)

        buffer("qweight", True, (out_features, packed_width(in_features, module.storage_bits)), stored)
        buffer("weight_scale", True, (out_features, *(() if integer_scales else groups)), torch.float32)
        buffer("weight_zero", zero, (out_features, *groups), torch.int8)
        kind = torch.int8 if integer_scales == "int8" else torch.int32
        buffer("group_scale", integer_scales, (out_features, *groups), kind)
        buffer("bias", bias, (out_features,), dtype)
        buffer("input_scale", input_scales, (input_scales,), torch.float32)
        buffer("outlier_index", outliers, (outliers,), torch.int64)
        buffer("outlier_weight", outliers, (out_features, outliers), dtype)
        module._check_scales()
        return module

    @classmethod
    def from_parts(
        cls,
        codes: Tensor,
        weight_scale: Tensor,
        *,
        weight_bits: int,
        activation_bits: int | None = None,
        group_size: int = 0,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        outlier_index: Tensor | None = None,
        outlier_weight: Tensor | None = None,
        hadamard: bool = False,
        modality: ModalityContext | None = None,
        dtype: torch.dtype = torch.float32,
        weight_zero: Tensor | None = None,
        amplifier: int = 0,
        step: Tensor | None = None,
        float8: bool = False,
    ) -> QuantLinear:
        """From int8 or float8 codes [N, K] (packed here if they fit 4 bits) and the other parts, which it keeps.

        ``amplifier``: of weight scales that are integers over it (solvers/integer_scale.py); 0 for any floats.
        ``step`` [N]: of rows whose scales are small multiples of it (progressive).
        """
        out_features, in_features = codes.shape
        module = cls(
            in_features,
            out_features,
            weight_bits=weight_bits,
            activation_bits=activation_bits,
            group_size=group_size,
            hadamard=hadamard,
            device=codes.device,
            dtype=dtype,
            float8=float8,
        )
        stored = codes.to(module.code_dtype) if module.storage_bits == 8 else pack(codes, module.storage_bits)
        group_scale = None
        scales = Quantized(codes, weight_scale, amplifier=amplifier, step=step)
        if scales.integer:
            group_scale, weight_scale = scales.integer_scales()
        parts = {
            "qweight": stored,
            "weight_scale": weight_scale.float(),
            "weight_zero": weight_zero,
            "group_scale": group_scale,
            "bias": bias,
            "input_scale": None if input_scale is None else input_scale.float(),
            "outlier_index": outlier_index,
            "outlier_weight": outlier_weight,
        }
        for name, part in parts.items():
            module.register_buffer(name, None if part is None else part.detach().contiguous())
        module.modality = modality
        module._check_scales()
        return module

    def codes(self) -> Tensor:
        """The int8 or float8 codes [N, K]."""
        return unpack(self.qweight, self.in_features, self.storage_bits)

    @property
    def weight(self) -> Tensor:
        """The float weight [N, K] that the codes stand for, computed at every access."""
        scale = self.weight_scale if self.group_scale is None else self.weight_scale[:, None] * self.group_scale
        w = dequantize(self.qweight, scale, self.in_features, self.storage_bits, self.group_size, torch.float32, self.weight_zero)
        if self.outlier_index is not None and self.outlier_weight is not None:
            w = w.index_copy(-1, self.outlier_index, self.outlier_weight.float())
        if self.hadamard:
            w = w @ self.rotated(torch.eye(self.in_features, device=w.device)).T
        return w.to(self.float_dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The formula at the top of the file."""
        x = self.rotated(x)
        if self.input_scale is None:
            y = torch.ops.mmqc.weight_only_matmul(
                x, self.qweight, self.weight_scale, self.bias, self.storage_bits, self.group_size, self.weight_zero
            )
        else:
            scale, visual = self._row_scales(x, self.input_scale)
            code = (self.code_dtype,) if self.float8 else ()
            x_q = torch.ops.mmqc.quantize(x, scale, visual, self.activation_bits, *code)
            grouped: Any = (self.group_scale, self.group_size) if self.group_size else ()
            y = torch.ops.mmqc.scaled_matmul(
                x_q, self.qweight, scale, self.weight_scale, self.bias, visual, self.storage_bits, x.dtype, *grouped
            )
        if self.outlier_index is not None and self.outlier_weight is not None:
            y = y + F.linear(x.index_select(-1, self.outlier_index), self.outlier_weight.to(x.dtype))
        return y

    def _row_scales(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        if scale.shape[0] == 1:
            return scale, None
        if self.modality is None:
            raise RuntimeError("this linear has one input scale per modality and no ModalityContext: attach one to its model")
        visual = self.modality.rows(x)
        return (scale[:1], None) if visual is None else (scale, visual)

    def _check_scales(self) -> None:
        if self.group_scale is not None and (self.input_scale is None or not self.group_size):
            raise ValueError("integer scales are those of groups, of a linear with quantized inputs")
        if (self.input_scale is None) != (self.activation_bits is None):
            raise ValueError("a static linear has input_scale and activation_bits, a weight-only one has neither")

    def extra_repr(self) -> str:
        """Sizes and scheme."""
        scheme = self.scheme + ("" if self.group_scale is None else "-i")
        extras = [f"bias={self.bias is not None}"]
        if self.input_scale is not None:
            extras.append(f"input_scales={self.input_scale.shape[0]}")
        if self.hadamard:
            extras.append("hadamard=True")
        if self.outlier_index is not None:
            extras.append(f"outliers={self.outlier_index.shape[0]}")
        return f"{self.in_features}, {self.out_features}, {scheme}, {', '.join(extras)}"


def _check_spec(weight_bits: int, activation_bits: int | None, group_size: int) -> None:
    if not 2 <= weight_bits <= 8:
        raise ValueError(f"weight_bits = {weight_bits}: 2 to 8")
    if activation_bits is not None and not 2 <= activation_bits <= 8:
        raise ValueError(f"activation_bits = {activation_bits}: 2 to 8, or None for weight-only")
    if group_size < 0:
        raise ValueError(f"group_size = {group_size}: 0, or input channels per weight scale")
