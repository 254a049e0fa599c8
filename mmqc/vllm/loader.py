"""vLLM's loader for ``--load-format mmqc``: norms that became mmqc's are put in, and every tensor is compared with its hash.

The files are read as vLLM reads them by default, tensor by tensor.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from mmqc.checkpoint.method_name import METHOD
from mmqc.vllm.specs import NORMS, PluginError


class MmqcModelLoader(DefaultModelLoader):
    """Of checkpoints whose quantization is mmqc's."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))
        self._config: Any = None

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """The model, with its weights.

        Raises:
            PluginError: mmqc did not quantize it, or it has no place for a norm.
            CheckpointError: a tensor is not as it was saved.
        """
        from mmqc.vllm.config import MmqcVllmConfig

        if not isinstance(vllm_config.quant_config, MmqcVllmConfig):
            raise PluginError(f"{model_config.model} was not quantized by mmqc: serve without --load-format mmqc")
        self._config = vllm_config.quant_config
        return super().load_model(vllm_config, model_config, prefix)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Puts mmqc's norms in, then reads."""
        put_norms(model, self._config, model_config.dtype)
        super().load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """As they come, each compared with its hash."""
        return compared(super().get_all_weights(model_config, model), self._config.settings.get("hashes") or {})


def put_norms(model: nn.Module, config: Any, dtype: torch.dtype) -> None:
    """The norms of the checkpoint in the places of the model's LayerNorms, without values.

    Raises:
        PluginError: where the checkpoint has a norm, the model has none that could be replaced.
    """
    from mmqc.checkpoint.module_spec import build_module

    norms = {name: spec for name, spec in config.modules.items() if spec["kind"] in NORMS}
    there = dict(model.named_modules())
    for name, spec in norms.items():
        old = there.get(name)
        if not isinstance(old, nn.LayerNorm):
            what = "nothing of that name" if old is None else f"a {type(old).__name__}"
            raise PluginError(
                f"the checkpoint has mmqc's norm {name}, where vLLM's model has {what}: quantize with keep_means=True"
            )
        device = next((p.device for p in old.parameters()), next(model.parameters()).device)
        norm: Any = build_module(spec, {str(spec.get("dtype")): dtype}).to_empty(device=device)
        if hasattr(norm, "rebuild_factors"):
            norm.rebuild_factors(device)
        model.set_submodule(name, norm.requires_grad_(False).eval())
        del config.modules[name]


def compared(weights: Iterator[tuple[str, Tensor]], hashes: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors.

    Raises:
        CheckpointError: one is not as it was saved; names it.
    """
    from mmqc.checkpoint.checksum import AGAIN, OFFLOADED, CheckpointError, digest

    known = set(hashes.values())
    for name, tensor in weights:
        wanted = hashes.get(name)
        if wanted != OFFLOADED and hashes:
            found = digest(tensor)
            if found != wanted and (wanted is not None or found not in known):  # a class may rename what it saves
                raise CheckpointError(f"the checkpoint is damaged: {name} differs from what was saved; {AGAIN}")
        yield name, tensor


def register(name: str = METHOD) -> None:
    """Under a name for ``--load-format``."""
    register_model_loader(name)(MmqcModelLoader)
