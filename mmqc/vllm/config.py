"""vLLM's view of a ``quantization_config`` that mmqc wrote: which linear is made of which modules, and how it computes."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from mmqc.checkpoint.method_name import METHOD
from mmqc.vllm.specs import LINEARS, NORMS, PluginError, check, parts_of
from mmqc.vllm.visual import VisualRows


class MmqcVllmConfig(QuantizationConfig):
    """Of one model.

    Attributes:
        settings: the ``quantization_config``.
        modules: specs of our modules by vLLM's names.
        visual: the mask of a model with scales per modality.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        check(settings)
        self.settings = settings
        self.modules: dict[str, Any] = dict(settings["modules"])
        self.visual: VisualRows | None = None
        self._claimed: set[str] = set()

    def get_name(self) -> Any:
        """As in config.json."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What mmqc's linears take."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere: mmqc's kernels are Triton's."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: all is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MmqcVllmConfig:
        """From config.json's ``quantization_config``.

        Raises:
            PluginError: it holds something that vLLM has no place for.
        """
        return cls(config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Gives the modules the names that the model's class gives them."""
        ends = ".weight"  # mappers are of tensors' names: a prefix may end with the dot
        found = hf_to_vllm_mapper.apply_dict({name + ends: spec for name, spec in self.modules.items()})
        self.modules = {name.removesuffix(ends): spec for name, spec in found.items()}

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """How a layer of vLLM's computes.

        Raises:
            PluginError: it is made of modules that it cannot compute together, or at all.
        """
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            if self._by_modality():
                self._rows().watch(layer, layer.org_vocab_size, _special_ids())
            return None
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        parts = parts_of(prefix, self.packed_modules_mapping, self.modules)
        if not parts:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        self._claimed |= set(parts)
        if any(self.modules[part].get("input_scales") == 2 for part in parts):
            if isinstance(layer, ParallelLMHead):
                raise PluginError(f"{prefix} has a scale per modality, and vLLM's head sees no order of tokens: keep=[{prefix!r}]")
            self._rows()
        from mmqc.vllm.method import MmqcLinearMethod  # with all that computes

        return MmqcLinearMethod(self, prefix, parts)

    def finished(self) -> None:
        """Whether all is in its place, once the model is built.

        Raises:
            PluginError: a module of the checkpoint has no layer in vLLM's model, or what it needs is not there.
        """
        one_stage = get_pp_group().world_size == 1
        lost = [n for n, spec in self.modules.items() if spec["kind"] in LINEARS and n not in self._claimed]
        if one_stage and lost:
            raise PluginError(f"{lost[0]} is quantized, and vLLM's model has no such linear, or does not let it be quantized")
        if self.visual is not None and not self.visual.noted:
            raise PluginError(
                "the decoder has a scale per modality, and no embedding here that sees the tokens: serve without pipeline "
                "parallelism, or quantize with mquant(msq=False)"
            )
        norms = [n for n, spec in self.modules.items() if spec["kind"] in NORMS]
        if norms:
            raise PluginError(
                f"{norms[0]} is no norm of vLLM's any more, and became one of mmqc's: serve with --load-format {METHOD}"
            )

    def _by_modality(self) -> bool:
        return any(spec.get("input_scales") == 2 for spec in self.modules.values())

    def _rows(self) -> VisualRows:
        if self.visual is None:
            config: Any = get_current_vllm_config()  # pyright: ignore[reportCallIssue]  (it takes this package for vLLM)
            graphs = getattr(config.compilation_config, "max_cudagraph_capture_size", None) or 0
            most = max(int(config.scheduler_config.max_num_batched_tokens), int(graphs))
            self.visual = VisualRows(most, self.settings.get("visual_token_ids") or ())
        return self.visual


def _special_ids() -> list[int]:
    """Ids that the model's config gives a meaning."""
    config: Any = get_current_vllm_config()  # pyright: ignore[reportCallIssue]  (it takes this package for vLLM)
    values = vars(getattr(config.model_config, "hf_config", None) or object).items()
    return [value for name, value in values if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)]


def register(name: str = METHOD) -> None:
    """Under the name that config.json gives the method."""
    register_quantization_config(name)(MmqcVllmConfig)
