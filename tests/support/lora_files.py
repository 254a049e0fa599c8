"""Random adapters as peft writes them, made without peft, and the float model that one means."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "target_modules": ["q_proj"], "lora_bias": False}
SCALING = 2.0


def targets(model: nn.Module, head: str = "lm_head") -> list[str]:
    """The linears that "all-linear" means and that are called as modules."""
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != head]


def write_adapter(model: nn.Module, directory: Path, names: list[str], *, biased: bool = False, **config: Any) -> dict[str, Tensor]:
    """Writes an adapter of rank 3 for these linears; its tensors, as they are in the file."""
    g = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name in names:
        linear = model.get_submodule(name)
        n, k = linear.weight.shape
        dtype = linear.weight.dtype
        tensors[f"base_model.model.{name}.lora_A.weight"] = (torch.randn(3, k, generator=g) / math.sqrt(k)).to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = (torch.randn(n, 3, generator=g) / 8).to(dtype)
        if biased:
            tensors[f"base_model.model.{name}.lora_B.bias"] = (torch.randn(n, generator=g) / 8).to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, "lora_bias": biased, **config}))
    return tensors


@torch.no_grad()
def merged(model: nn.Module, tensors: dict[str, Tensor], scaling: float = SCALING) -> nn.Module:
    """A copy of the float model with s B A in its weights, and s c in its biases."""
    model = copy.deepcopy(model)
    for key, down in tensors.items():
        if not key.endswith("lora_A.weight"):
            continue
        name, stem = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"), key.removesuffix("lora_A.weight")
        linear = model.get_submodule(name)
        linear.weight += scaling * tensors[f"{stem}lora_B.weight"] @ down
        bias = tensors.get(f"{stem}lora_B.bias")
        if bias is not None and linear.bias is None:
            linear.bias = nn.Parameter(torch.zeros_like(bias))
        if bias is not None:
            linear.bias += scaling * bias
    return model
