"""Which linear of a model a layer of an adapter is for, what the rewrites did to it, and the layer behind that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mmqc.adapters.errors import AdapterError
from mmqc.adapters.fold import fold
from mmqc.adapters.read import Adapter, Layer
from mmqc.checkpoint.hf import MmqcConfig
from mmqc.checkpoint.linear_like import looks_linear
from mmqc.graph.change_data import from_data
from mmqc.graph.changes import Step
from mmqc.nn.adapted_linear import AdaptedLinear
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import HadamardLinear

NOTHING: dict[str, Any] = {"tables": [], "weights": {}}


def folded(model: nn.Module, adapter: Adapter) -> dict[str, Layer]:
    """Every layer of the adapter in the model's basis, float64, where the model's linears are.

    Raises:
        AdapterError: one does not fit the model, or cannot be folded.
    """
    record = _record(model)
    layers = {}
    for fqn, layer in adapter.layers.items():
        linear = _linear(model, fqn, layer, adapter)
        for name in record.get("unseen", ()):
            if f"{fqn}.weight".startswith(f"{name}.") or name == f"{fqn}.weight":
                raise AdapterError(f"{fqn}: no calibration batch reached {name}, and it does not fit what was rewritten")
        device, bias = device_of(linear), layer.bias
        here = Layer(layer.down.to(device), layer.up.to(device), None if bias is None else bias.to(device), layer.scaling)
        layers[fqn] = fold(here, _steps(model, record.get("changes", NOTHING), fqn), fqn)
    return layers


def quantization(model: nn.Module) -> MmqcConfig | None:
    """What mmqc left on the model, if it was here."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    return config if isinstance(config, MmqcConfig) else None


def dtype_of(linear: nn.Module) -> torch.dtype:
    """Of the float weight that a linear has or stands for."""
    linear = linear.base if isinstance(linear, AdaptedLinear) else linear
    return linear.float_dtype if isinstance(linear, PackedLinear) else linear.get_parameter("weight").dtype


def device_of(linear: nn.Module) -> torch.device:
    """Where a linear's weight is."""
    return (linear.qweight if isinstance(linear, PackedLinear) else linear.get_parameter("weight")).device


def _record(model: nn.Module) -> Mapping[str, Any]:
    """What the rewrites did to the model, as it is saved with it."""
    config, name = quantization(model), type(model).__name__
    if config is None:
        if any(isinstance(m, PackedLinear | HadamardLinear) for m in model.modules()):
            raise AdapterError(f"{name} is no model of transformers': what the rewrites did to it is not kept with it")
        return {}
    if "read" in config.record:
        raise AdapterError(
            f"this {name} was read from a checkpoint of {config.record['read']}: what another tool did to its weights besides "
            "rounding is not known; if it was nothing, load the adapter with peft's PeftModel.from_pretrained"
        )
    if config.record.get("passes") and "changes" not in config.record:
        raise AdapterError(f"this {name} was saved without what the rewrites did to it: quantize the float model with this mmqc")
    return config.record


def _steps(model: nn.Module, changes: Mapping[str, Any], fqn: str) -> list[Step]:
    """What was done to a linear's weight, under its own name or, if it is shared still, another."""
    names, weight = [f"{fqn}.weight"], model.get_submodule(fqn)._parameters.get("weight")
    if weight is not None:
        names += [n for n, p in model.named_parameters(remove_duplicate=False) if p is weight]
    return next((from_data(changes, name) for name in names if name in changes["weights"]), [])


def _linear(model: nn.Module, fqn: str, layer: Layer, adapter: Adapter) -> nn.Module:
    """The module that a layer is for, if it is a linear of these sizes."""
    modules = dict(model.named_modules())
    found = modules.get(fqn)
    if found is None:
        last = fqn.rpartition(".")[2]
        other = next((name for name in modules if name.endswith(f".{last}")), f"no {last}")
        raise AdapterError(f"{adapter.where} is for {fqn}, but {type(model).__name__} has {other}: was it trained on another one?")
    linear = found.base if isinstance(found, AdaptedLinear) else found
    if not isinstance(linear, PackedLinear) and not looks_linear(linear):
        raise AdapterError(f"{fqn} is a {type(linear).__name__}: adapters of linears alone can be folded")
    if isinstance(modules[fqn.rpartition(".")[0]], nn.MultiheadAttention):
        raise AdapterError(f"{fqn} is a part of nn.MultiheadAttention, which uses its weight without calling it")
    given = (layer.up.shape[0], layer.down.shape[1])
    if isinstance(linear, nn.Linear | PackedLinear | HadamardLinear) and given != (linear.out_features, linear.in_features):
        has = [linear.out_features, linear.in_features]
        raise AdapterError(f"{fqn}: the adapter is for a weight {list(given)}, not {has}: was it trained on another model?")
    return linear
