"""``mmqc.load_quantized(directory)``: a checkpoint that AutoAWQ, GPTQModel or LLM Compressor made, behind mmqc's kernels.

The packed tensors become mmqc's (``foreign_weights``), and the model is built by ``from_pretrained`` as if mmqc had saved it; so it
compiles, saves and exports like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_utils import PreTrainedModel

from mmqc.checkpoint import manifest
from mmqc.checkpoint.foreign_weights import READERS, ForeignError
from mmqc.checkpoint.hf import MmqcConfig, model_init
from mmqc.checkpoint.module_spec import dtype_name, module_spec
from mmqc.checkpoint.skeleton.tensor_names import loaded

LEFT = ("activations", "kv_cache")
CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point")


def load_quantized(directory: str | Path, *, leave: Collection[str] = (), **options: Any) -> PreTrainedModel:
    """The model of a checkpoint in the format of AWQ, GPTQ or compressed-tensors, with mmqc's linears.

    Args:
        directory: with config.json and safetensors.
        leave: "activations", "kv_cache": what the checkpoint quantizes at run time and the model is to leave in floating point.
        options: of ``from_pretrained``: ``dtype`` (default: the checkpoint's), ``device_map``, ...

    Raises:
        ForeignError: a format or a layer that mmqc's modules cannot represent.
        CheckpointError: a damaged file, an index that leads out of the directory, or, where mmqc wrote the checkpoint (it has a
            mmqc_manifest.json), anything that differs from what was saved.
        FileNotFoundError: no config.json or no safetensors there.
    """
    directory = Path(directory)
    if unknown := set(leave) - set(LEFT):
        raise ValueError(f"leave = {sorted(unknown)}: allowed are {', '.join(LEFT)}")
    saved_by_us = manifest.read(directory) if manifest.exists(directory) else None
    if saved_by_us is not None:
        manifest.check_config(saved_by_us, directory)
    config: Any = AutoConfig.from_pretrained(directory)
    settings = getattr(config, "quantization_config", None) or {}
    method = settings.get("quant_method")
    if method not in READERS:
        raise ForeignError(
            f"{directory} has quant_method {method!r}; load_quantized reads {', '.join(READERS)}, and from_pretrained the rest"
        )
    if settings.get("kv_cache_scheme") and "kv_cache" not in leave:
        raise ForeignError(
            f"{directory} quantizes the KV cache with static scales, which mmqc does not: load_quantized(..., "
            "leave=('kv_cache',)) leaves it in floating point"
        )
    tensors = manifest.read_tensors(directory)
    if saved_by_us is not None:
        manifest.check_tensors(saved_by_us, tensors, directory)
    del config.quantization_config
    cls: type[PreTrainedModel] = getattr(transformers, config.architectures[0])
    saved = config.dtype or torch.float16
    with model_init(cls, saved):
        skeleton = cls(config)
    state, specs = _converted(skeleton, tensors, {**settings, "leave": tuple(leave)}, saved)
    config.quantization_config = MmqcConfig(modules=specs, dtype=dtype_name(saved), record={"passes": [], "read": method}).to_dict()
    return cls.from_pretrained(None, config=config, state_dict=state, **{"dtype": saved, **options})


def _converted(
    skeleton: PreTrainedModel, tensors: dict[str, Tensor], settings: Mapping[str, Any], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The checkpoint with mmqc's tensors in place of the packed ones, and the specs of their modules."""
    marker, read = READERS[settings["quant_method"]]
    of_cache = settings.get("kv_cache_scheme") is not None
    state = {n: t for n, t in tensors.items() if not (of_cache and n.endswith(CACHE_SCALES))}
    specs: dict[str, Any] = {}
    for prefix in [name.removesuffix(f".{marker}") for name in tensors if name.endswith(f".{marker}")]:
        own = {n.rpartition(".")[2]: state.pop(n) for n in list(state) if n.rpartition(".")[0] == prefix}
        fqn = _local(skeleton, prefix)
        linear = read(own, {**settings, "module": fqn}, prefix).linear(own.get("bias"), dtype)
        spec = module_spec(linear)
        assert spec is not None
        specs[fqn] = spec
        state |= {f"{fqn}.{name}": tensor for name, tensor in linear.state_dict().items()}
    if not specs:
        raise ForeignError(f"no tensor of the checkpoint is called *.{marker}; is it quantized at all?")
    ours = [name for name in state if name.rpartition(".")[0] in specs]
    there = {*ours, *(name for name in skeleton.state_dict() if name.rpartition(".")[0] not in specs)}
    for name, place, by_operation in loaded(skeleton, ours, there):
        if by_operation or place != name:
            raise ForeignError(
                f"transformers would take {name} for {place}: the linears of {type(skeleton).__name__} cannot be adopted"
            )
    return state, specs


def _local(skeleton: PreTrainedModel, prefix: str) -> str:
    """The linear that the checkpoint calls ``prefix``: transformers renames modules between versions."""
    state = skeleton.state_dict()
    ((_, name, by_operation),) = loaded(skeleton, [f"{prefix}.weight"], state)
    if by_operation:
        raise ForeignError(
            f"the checkpoint has {prefix}, which transformers joins, cuts or permutes to make {name} of it: only linears that a "
            f"{type(skeleton).__name__} has as they are can be adopted"
        )
    fqn = (name if name in state else f"{prefix}.weight").removesuffix(".weight")
    try:
        found = skeleton.get_submodule(fqn)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Linear):
        what = "no such module" if found is None else f"a {type(found).__name__}"
        raise ForeignError(f"the checkpoint has {prefix}, where {type(skeleton).__name__} has {what}: only linears can be adopted")
    return fqn
