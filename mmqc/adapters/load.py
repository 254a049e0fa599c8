"""``mmqc.load_adapter(model, directory)``: an adapter of the float model, on the model that mmqc made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmqc.adapters.errors import AdapterError
from mmqc.adapters.match import dtype_of, folded, quantization
from mmqc.adapters.merge import merge as merge_layers
from mmqc.adapters.read import CONFIG, FOLDED, PREFIX, TENSORS, Layer, read_adapter
from mmqc.nn.adapted_linear import AdaptedLinear, LowRank


@torch.no_grad()
def load_adapter(model: nn.Module, directory: str | Path, *, name: str = "default", merge: bool = False) -> list[str]:
    """Puts a LoRA adapter that was trained on the float model onto the model that mmqc made of it.

    Norms may have been folded, channels scaled, spaces rotated: the adapter's factors are changed likewise, exactly.  It is
    saved with the model, and ``unload_adapter`` takes it off again.  Several add up.

    Args:
        model: one of transformers', quantized or rewritten by ``quantize_``, or loaded again; with ``merge`` also a float one.
        directory: what ``save_pretrained`` of peft's model wrote.
        name: for ``unload_adapter``.
        merge: add s B A to float weights and keep nothing; before ``quantize_``, or after exact rewrites alone.

    Returns:
        FQNs of the linears that got a term.

    Raises:
        AdapterError: the adapter is more than low-rank terms of linears, does not fit the model, or cannot be carried through
            what was done to a linear; names the linear and the reason.  Nothing was changed then.
    """
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise AdapterError(f"name = {name!r}: a letter, then letters, digits and underscores: it becomes a part of tensors' names")
    adapter = read_adapter(directory)
    if not merge and quantization(model) is None:
        raise AdapterError(
            f"this {type(model).__name__} is a float model: pass merge=True to add the adapter to its weights before quantize_, or "
            "use peft's PeftModel.from_pretrained"
        )
    layers = folded(model, adapter)
    if merge:
        merge_layers(model, layers)
        return list(layers)
    for fqn in layers:
        module = model.get_submodule(fqn)
        if isinstance(module, AdaptedLinear) and name in module.terms:
            raise AdapterError(f"{fqn} has an adapter {name!r} already: unload it (mmqc.unload_adapter), or pass another name")
    for fqn, layer in layers.items():
        _add(model, fqn, name, layer)
    return list(layers)


def unload_adapter(model: nn.Module, name: str = "default") -> list[str]:
    """Takes an adapter off again; the model is what it was before ``load_adapter``.

    Args:
        model: on which it is.
        name: that it was loaded by.

    Returns:
        FQNs of the linears that had a term of it.

    Raises:
        AdapterError: there is no adapter of that name.
    """
    places = {fqn: m for fqn, m in model.named_modules() if isinstance(m, AdaptedLinear)}
    found = [fqn for fqn, module in places.items() if name in module.terms]
    if not found:
        known = sorted({n for module in places.values() for n in module.terms})
        raise AdapterError(f"no adapter {name!r} is on this model; there is {', '.join(known) or 'none'}")
    for fqn in found:
        del places[fqn].terms[name]
        if not places[fqn].terms:
            model.set_submodule(fqn, places[fqn].base)
    return found


@torch.no_grad()
def fold_adapter(model: nn.Module, directory: str | Path, out: str | Path) -> Path:
    """Writes an adapter of the float model as one of this model, for ``PeftModel.from_pretrained(model, out)`` to load.

    Args:
        model: as for ``load_adapter``; it is not changed.
        directory: what peft wrote.
        out: the directory to write; made if it is not there.

    Returns:
        ``out``.

    Raises:
        AdapterError: as ``load_adapter``; or ``out`` is ``directory``.
    """
    adapter, out = read_adapter(directory), Path(out)
    if out.resolve() == adapter.where.resolve():
        raise AdapterError(f"{out} holds the adapter of the float model: write the folded one elsewhere")
    layers = folded(model, adapter)
    biased = any(layer.bias is not None for layer in layers.values())
    tensors: dict[str, Tensor] = {}
    for fqn, layer in layers.items():
        parts = {"lora_A.weight": layer.down, "lora_B.weight": layer.up}
        if biased:
            parts["lora_B.bias"] = layer.up.new_zeros(len(layer.up)) if layer.bias is None else layer.bias
        dtype = dtype_of(model.get_submodule(fqn))
        tensors |= {f"{PREFIX}{fqn}.{part}": tensor.to(dtype).contiguous() for part, tensor in parts.items()}
    out.mkdir(parents=True, exist_ok=True)
    config = {**adapter.config, "lora_bias": biased, "target_modules": sorted(layers), "layers_to_transform": None}
    save_file(tensors, out / TENSORS, metadata={"format": "pt", FOLDED: "true"})
    (out / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return out


def _add(model: nn.Module, fqn: str, name: str, layer: Layer) -> None:
    """The layer beside its linear, its factor s in B and c."""
    module = model.get_submodule(fqn)
    dtype = dtype_of(module)
    bias = None if layer.bias is None else (layer.scaling * layer.bias).to(dtype)
    term = LowRank(layer.down.to(dtype), (layer.scaling * layer.up).to(dtype), bias)
    if isinstance(module, AdaptedLinear):
        module.terms[name] = term
    else:
        model.set_submodule(fqn, AdaptedLinear(module, {name: term}).train(module.training))
