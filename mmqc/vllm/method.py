"""vLLM's linears with mmqc's arithmetic: vLLM cuts and fills the tensors, and a module of ours of the rank's size computes."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)

from mmqc.checkpoint.module_spec import dtype_name
from mmqc.vllm import shard
from mmqc.vllm.parameters import parameter
from mmqc.vllm.specs import PluginError, joined


@register_weight_loader_v2_supported_method
class MmqcLinearMethod(LinearMethodBase):
    """Of one linear; ``parts`` are the checkpoint's modules that it is made of, by vLLM's names, in the config's."""

    def __init__(self, config: Any, name: str, parts: list[str]) -> None:
        self.config, self.name = config, name
        self.spec = joined(name, [config.modules[part] for part in parts])
        self.bias = [bool(config.modules[part].get("bias")) for part in parts]

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **options: Any,
    ) -> None:
        """Parameters under the names of the checkpoint's tensors."""
        del output_size
        width = sum(self.spec.get("widths", ())) or self.spec["in"]
        if width != input_size:
            raise PluginError(f"{self.name} reads {input_size} channels in vLLM, and {width} in the checkpoint")
        self.spec["dtype"] = dtype_name(params_dtype)
        self.outputs = list(output_partition_sizes)
        self.ranks = input_size // input_size_per_partition
        for own, stored in shard.layout(self.name, self.spec, self.outputs, self.ranks).items():
            layer.register_parameter(own, parameter(stored, len(self.outputs), options["weight_loader"]))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Hands the tensors to a module of ours."""
        if hasattr(layer, "mmqc"):
            return
        self.config.finished()
        has: Any = getattr(layer, shard.BIAS, None)
        if any(self.bias) != all(self.bias) or any(self.bias) != (has is not None):
            here, there = "a bias" if has is not None else "no bias", "one" if any(self.bias) else "none"
            raise PluginError(
                f"{self.name} has {here} in vLLM, and {there} in the checkpoint; quantize without rewrites (rotate=False)"
            )
        named = [own for own, value in layer._parameters.items() if own != shard.BIAS and value is not None]
        tensors = {own: layer.get_parameter(own).data for own in named}
        for own, tensor in tensors.items():
            if tensor.dtype == torch.float32 and tensor.isnan().any():
                raise PluginError(f"{self.name}.{own} is not complete: the checkpoint lacks it, or parts of it")
            del layer._parameters[own]
        rows, rank = isinstance(layer, RowParallelLinear), int(getattr(layer, "tp_rank", 0))
        adds = has is not None and not getattr(layer, "skip_bias_add", False) and not (rows and rank > 0)
        layer.mmqc = shard.build(
            self.name,
            self.spec,
            tensors,
            self.outputs,
            bias=has.data if has is not None and adds else None,
            visual=self.config.visual,
            rank=rank,
            ranks=self.ranks,
            gather=tensor_model_parallel_all_gather,
        )

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The module of ours, which holds the bias."""
        del bias
        module: Any = layer.mmqc
        return module(x)
