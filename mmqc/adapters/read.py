"""A LoRA adapter as ``peft`` saves it: adapter_config.json and adapter_model.safetensors.  peft is not needed to read it.

    W' = W + s B A        y' = y + s c        s = alpha / r, or alpha / √r (rslora)

Shapes:  A [r, K]   B [N, r]   c [N], the bias of B (``lora_bias``), or none
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mmqc.adapters.errors import AdapterError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FOLDED = "mmqc_folded"  # in the metadata of the tensors of an adapter that was folded
STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")  # of init_lora_weights: these change the base weight
OTHERS = ("modules_to_save", "target_parameters", "layer_replication", "trainable_token_indices", "alora_invocation_tokens")
_VARIANT = re.compile(r"use_(?!rslora).*|(?!eva_|loftq_|megatron_).*_config")  # keys that mean more, where they are set
_KEY = re.compile(r"(.+)\.(lora_A|lora_B)\.(weight|bias)")


@dataclass(frozen=True, eq=False)
class Layer:
    """What an adapter adds to one linear; B and c without the factor s."""

    down: Tensor
    up: Tensor
    bias: Tensor | None
    scaling: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter.

    Attributes:
        config: what adapter_config.json holds.
        layers: by the FQN of the linear in the model that it was trained on.
        where: the directory.
    """

    config: dict[str, Any]
    layers: dict[str, Layer]
    where: Path


def read_adapter(directory: str | Path) -> Adapter:
    """Reads a directory that ``save_pretrained`` of a peft model wrote.

    Raises:
        AdapterError: there is none, or it holds more than low-rank terms of linears; names what.
    """
    where = Path(directory)
    missing = [name for name in (CONFIG, TENSORS) if not (where / name).is_file()]
    if missing:
        raise AdapterError(f"{where} has no {missing[0]}: name the directory that peft's save_pretrained wrote")
    config = json.loads((where / CONFIG).read_text(encoding="utf-8"))
    found = next(_objections(config), None)
    if found is not None:
        raise AdapterError(f"{where / CONFIG}: {found}")
    parts: dict[str, dict[str, Tensor]] = {}
    with safe_open(where / TENSORS, "pt") as file:
        if FOLDED in (file.metadata() or {}):
            raise AdapterError(f"{where} is in an mmqc model's basis already: load it with peft's PeftModel.from_pretrained")
        for key in file.keys():  # noqa: SIM118 (no mapping)
            match = _KEY.fullmatch(key.removeprefix(PREFIX))
            if match is None:
                raise AdapterError(f"{where / TENSORS}: {key} is no low-rank term of a linear, the only kind that can be folded")
            parts.setdefault(match[1], {})[f"{match[2]}.{match[3]}"] = file.get_tensor(key)
    return Adapter(config, {fqn: _layer(fqn, tensors, config, where) for fqn, tensors in parts.items()}, where)


def _objections(config: Mapping[str, Any]) -> Iterator[str]:
    """Why the adapter is more than low-rank terms."""
    if config.get("peft_type") != "LORA":
        yield f"peft_type = {config.get('peft_type')!r}: only LORA can be folded"
    if config.get("bias", "none") != "none":
        yield f"bias = {config['bias']!r}: biases of the base model were trained too, and are not low-rank terms"
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(STARTS):
        yield f"init_lora_weights = {start!r} changed the base weights: save it with path_initial_model_for_weight_conversion"
    for name, value in config.items():
        if value and (name in OTHERS or _VARIANT.fullmatch(name)):
            yield f"{name} = {value!r}: more than low-rank terms of linears"


def _layer(fqn: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: Path) -> Layer:
    down, up = tensors.get("lora_A.weight"), tensors.get("lora_B.weight")
    if down is None or up is None or down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise AdapterError(f"{where / TENSORS}: {fqn} has no A [r, K] and B [N, r] of a linear")
    rank, patterns = down.shape[0], config.get("alpha_pattern") or {}
    alpha = next((v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", fqn)), config["lora_alpha"])
    scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    bias = tensors.get("lora_B.bias")
    if not all(bool(torch.isfinite(t).all()) for t in tensors.values()):
        raise AdapterError(f"{where / TENSORS}: {fqn} holds NaN or infinity; was the training stable?")
    return Layer(down, up, bias, scaling)
