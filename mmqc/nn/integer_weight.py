"""What modules with an integer weight share: how they store codes, what a change of dtype leaves alone, and their description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor

from mmqc.nn.online_hadamard import OnlineHadamard
from mmqc.ops.pack import FLOAT8, stored_bits

SCALES = ("weight_scale", "weight_divisor", "input_scale")  # float32 whatever the model's dtype
CODES = ("qweight", "weight_zero")  # in the dtype that they were made in


class IntegerWeight(OnlineHadamard):
    """Base class; ``float_dtype`` is that of the float weight that the codes stand for."""

    out_features: int
    weight_bits: int
    activation_bits: int | None
    group_size: int
    storage_bits: int  # of a code; no property: a trace goes through one at each of a model's linears
    float_dtype: torch.dtype
    bias: Tensor | None
    float8 = False  # codes of 8 bits, activations' and weights', are float8_e4m3fn

    @property
    def code_dtype(self) -> torch.dtype:
        """Of activations' codes, and of the weight's where these have 8 bits."""
        return FLOAT8 if self.float8 else torch.int8

    @property
    def scheme(self) -> str:
        """E.g. W4A16-g128, W4A16-g128-asym with zero points (-asym-float: between the codes), W8A8-fp8."""
        group = f"-g{self.group_size}" if self.group_size else ""
        group += {False: "", True: "-asym", "float": "-asym-float"}[kind_of_zero(self._buffers.get("weight_zero"))]
        group += "-fp8" if self.float8 else ""
        return f"W{self.weight_bits}A{self.activation_bits or 16}{group}"

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        return {
            "in": self.in_features,
            "out": self.out_features,
            "weight_bits": self.weight_bits,
            "activation_bits": self.activation_bits,
            "group_size": self.group_size,
            "hadamard": self.hadamard,
            "bias": self.bias is not None,
        }

    def _allocate(self, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None], device: Any) -> None:
        """Buffers of these shapes and dtypes without values; None where there is none."""
        for name, of in layout.items():
            self.register_buffer(name, None if of is None else torch.empty(of[0], dtype=of[1], device=device))

    def _fill(self, parts: Mapping[str, Tensor | None]) -> None:
        """These values in the place of the buffers', and the online Hadamard on their device."""
        for name, part in parts.items():
            setattr(self, name, None if part is None else part.detach().contiguous())
        self.rebuild_factors(self.get_buffer("qweight").device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales, codes = ({name: self._buffers.get(name) for name in names} for names in (SCALES, CODES))
        super()._apply(fn, recurse)
        for name, old in codes.items():  # float8 codes, and float16 zero points, are no numbers of the model's
            moved = self._buffers.get(name)
            if old is not None and moved is not None and moved.dtype != old.dtype:
                self._buffers[name] = old.to(moved.device)
        self.float_dtype = fn(torch.empty(0, dtype=self.float_dtype)).dtype
        for name, old in scales.items():  # half() means the arithmetic around a linear, not its scales
            new = self._buffers.get(name)
            if old is not None and new is not None and new.dtype.itemsize < old.dtype.itemsize:
                self._buffers[name] = old.to(device=new.device, dtype=torch.float32)
        return self


def zero_dtype(zero: bool | Literal["float"]) -> torch.dtype:
    """Of zero points, as a spec names them: True, on the codes; "float", between them.

    Raises:
        ValueError: there are no others.
    """
    if zero not in (False, True, "float"):
        raise ValueError(f"zero = {zero!r}: False, True or 'float'")
    return torch.float16 if zero == "float" else torch.int8


def kind_of_zero(zero: Tensor | None) -> bool | Literal["float"]:
    """What a spec says of zero points."""
    return "float" if zero is not None and zero.is_floating_point() else zero is not None


class PackedLinear(IntegerWeight):
    """Base class of the linears with an integer weight.

    ``input_scale`` and ``outlier_index`` are None where inputs are quantized at run time or not at all, and where no input
    channel is kept in higher precision.
    """

    qweight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    outlier_index: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        weight_bits: int,
        activation_bits: int | None,
        group_size: int,
        hadamard: int,
        dtype: torch.dtype,
        device: Any,
    ) -> None:
        super().__init__()
        if not 2 <= weight_bits <= 8:
            raise ValueError(f"weight_bits = {weight_bits}: 2 to 8")
        if activation_bits is not None and not 2 <= activation_bits <= 8:
            raise ValueError(f"activation_bits = {activation_bits}: 2 to 8, or None for weight-only")
        if group_size < 0:
            raise ValueError(f"group_size = {group_size}: 0, or input channels per weight scale")
        self.float_dtype = dtype  # of the linear that this one stands for
        self.in_features, self.out_features = in_features, out_features
        self.weight_bits, self.activation_bits, self.group_size = weight_bits, activation_bits, group_size
        self.storage_bits = stored_bits(weight_bits, activation_bits is not None)
        self._init_hadamard(hadamard, device)

    def _unrotated(self, weight: Tensor) -> Tensor:
        """The weight that reads x of one that reads H x, in the dtype of the linear that this one stands for."""
        if self.hadamard:
            weight = weight @ self.rotated(torch.eye(self.in_features, device=weight.device)).T
        return weight.to(self.float_dtype)
