"""Quantizing while ``from_pretrained`` loads: each weight as it leaves its shard, so no whole float model is ever held.

transformers asks which parameters want this (``wanted``), hands each over as it comes, on its device (``QuantizeOnLoad``),
and puts what it gets back into the model.  A head that is tied to the embedding is in no shard: it is done after loading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.modeling_utils import PreTrainedModel

from mmqc.checkpoint.data_free import only_scheme, quantized_linear, select
from mmqc.config import QuantConfig, Scheme


class LoadPlan:
    """What to quantize on load, made from the model's skeleton; emptied as the weights come.

    Attributes:
        schemes: of the linears that are still to be quantized, by FQN.
    """

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.schemes: dict[str, Scheme] = {}
        self.transposed: set[str] = set()  # of those, the ones whose weight is stored as [K, N]

    def prepare(self, model: nn.Module) -> None:
        """Chooses the linears; ``model`` has no values yet.

        Raises:
            ConfigError: as ``only_scheme`` and ``select``.
        """
        chosen = select(model, self.config, only_scheme(self.config, model))
        self.schemes, self.transposed = chosen.schemes, chosen.transposed

    def wanted(self, name: str) -> bool:
        """Whether a parameter is the weight of a linear to quantize."""
        fqn, _, parameter = name.rpartition(".")
        return parameter == "weight" and fqn in self.schemes

    def element_size(self, name: str, float_size: float) -> float:
        """Bytes that an element of a parameter takes in the end, for the placement on devices; scales not counted."""
        return self.schemes[name.rpartition(".")[0]].weight.bits / 8 if self.wanted(name) else float_size

    @torch.no_grad()
    def swap(self, model: nn.Module, fqn: str, weight: Tensor) -> None:
        """Puts the quantized linear in place of ``fqn``; its bias is what the model has by now, perhaps without values."""
        old = model.get_submodule(fqn)
        bias = None if old.bias is None else old.get_parameter("bias")
        new, _ = quantized_linear(weight.t() if fqn in self.transposed else weight, bias, self.schemes.pop(fqn), fqn)
        for buffer in new.buffers():
            if not buffer.is_meta:
                buffer._is_hf_initialized = True  # type: ignore[attr-defined]
        model.set_submodule(fqn, new.train(old.training))

    def finish(self, model: PreTrainedModel) -> None:
        """Quantizes what came from no shard of its own: a tied head, or weights that the checkpoint lacks.

        Raises:
            ValueError: such a weight is not in memory.
        """
        for fqn in list(self.schemes):
            linear = model.get_submodule(fqn)
            if linear.get_parameter("weight").is_meta or hasattr(linear, "_hf_hook"):
                raise ValueError(
                    f"{fqn} shares its weight and was placed on another device or offloaded while loading, so it cannot be "
                    f"quantized on the way; load with one device in device_map, or call mmqc.quantize_ afterwards"
                )
            self.swap(model, fqn, linear.get_parameter("weight"))


class QuantizeOnLoad(ConversionOps):
    """Turns one loaded float weight into a quantized linear."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The weight alone, by name; nothing is left for transformers to set."""
        name, model = kwargs["full_layer_name"], kwargs["model"]
        (value,) = input_dict.values()
        weight = value[0] if isinstance(value, list) else value
        fqn = name.rpartition(".")[0]
        self.plan.swap(model, fqn, weight)
        missing = kwargs.get("missing_keys")
        if missing is not None:
            missing.discard(name)
        return {}
