"""An adapter added to float weights, before they are rounded.

    W <- W + s B A, or W Hᵀ + s B A Hᵀ behind an online Hadamard        b <- b + s c

Exact:   float64, rounded once to the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mmqc.adapters.errors import AdapterError
from mmqc.adapters.read import Layer
from mmqc.graph.changes import Spread
from mmqc.nn.adapted_linear import AdaptedLinear
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import HadamardLinear


def merge(model: nn.Module, layers: Mapping[str, Layer]) -> None:
    """Adds folded layers to their linears' weights.

    Raises:
        AdapterError: a linear cannot take its layer in; nothing was changed then.
    """
    for fqn, layer in layers.items():
        if problem := _why_not(model, fqn, layer):
            raise AdapterError(f"{fqn}: the adapter cannot be merged: {problem}")
    for fqn, layer in layers.items():
        linear: Any = model.get_submodule(fqn)
        spread = Spread.of(linear.in_features, int(linear.hadamard)) if isinstance(linear, HadamardLinear) else None
        down = layer.down if spread is None else spread(layer.down)
        pairs: list[Any] = [(linear.weight, layer.up @ down), (linear.bias, layer.bias)]
        for parameter, more in pairs:
            if more is not None:
                parameter.copy_((parameter.double() + layer.scaling * more).to(parameter.dtype))


def _why_not(model: nn.Module, fqn: str, layer: Layer) -> str:
    linear = model.get_submodule(fqn)
    if isinstance(linear, PackedLinear):
        return "its weight is quantized, and rounding would lose it; merge it into the float model, or load it without merge=True"
    if isinstance(linear, AdaptedLinear):
        return "another adapter is loaded there; unload that first"
    if not isinstance(linear, nn.Linear | HadamardLinear):
        return f"it is a {type(linear).__name__}; merge it with peft before quantize_"
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if p is linear.weight and name != f"{fqn}.weight"]
    if names:
        return f"its weight is that of {names[0]} too"
    return "it has no bias to take the adapter's in" if layer.bias is not None and linear.bias is None else ""
