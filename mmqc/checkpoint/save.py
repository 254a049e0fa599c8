"""``mmqc.save_pretrained(model, directory, format=..., engine=...)``: mmqc's own checkpoint, or one that other engines read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from mmqc.checkpoint import compressed_tensors, engine_export, manifest
from mmqc.checkpoint.hf import MmqcQuantizer
from mmqc.checkpoint.skeleton.tensor_names import joined
from mmqc.checkpoint.skeleton.untie import computes_by_flag
from mmqc.engines.table import rules
from mmqc.errors import MmqcError
from mmqc.nn.integer_weight import PackedLinear

FORMATS = ("mmqc", "compressed-tensors")


class FormatError(MmqcError, ValueError):
    """A format that cannot say what the model holds; names the modules and what to do instead."""


def save_pretrained(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    format: str | None = None,
    engine: str | None = None,
    gpu: str = "h100",
    **options: Any,
) -> Path:
    """Saves a quantized model for ``from_pretrained``.

    Args:
        model: one of transformers', quantized by ``quantize_``.
        directory: made if it is not there.
        format: ``mmqc``, the default without an engine: everything, loaded once mmqc is imported, the same as
            ``model.save_pretrained(directory)``; or ``compressed-tensors``: for vLLM, and for transformers without mmqc (see
            mmqc/checkpoint/compressed_tensors.py), with a mmqc_manifest.json that only ``load_quantized`` reads.
        engine: "vllm==0.32" or "vllm==0.33": compressed-tensors as that version takes it on ``gpu``, asked of it linear by linear
            (``recipes.for_engine`` plans for it); a scale per modality becomes one per token.  mmqc_engine.json beside the
            checkpoint names the kernels and the command that serves it.
        gpu: "a100", "l40s", "h100", or a capability like "9.0".
        options: of transformers' ``save_pretrained``, e.g. ``max_shard_size``.

    Returns:
        The directory.

    Raises:
        ValueError: another format, or a model that mmqc did not quantize.
        EngineError: an engine or a GPU of which nothing is known.
        FormatError: the format cannot express the model, or the engine does not take it; nothing is written.
    """
    known = rules(engine, gpu) if engine is not None else None
    format = format or ("mmqc" if engine is None else "compressed-tensors")
    if known is not None and format != "compressed-tensors":
        raise ValueError(f"format = {format!r}: engine = {engine!r} reads 'compressed-tensors'")
    if format not in FORMATS:
        raise ValueError(f"format = {format!r}: {' or '.join(map(repr, FORMATS))}")
    if not any(isinstance(m, PackedLinear) for m in model.modules()):
        raise ValueError("this model has no linear that mmqc quantized; call mmqc.quantize_(model, config) first")
    if format == "mmqc":
        model.save_pretrained(directory, **options)
        return Path(directory)
    _refuse(
        "compressed-tensors cannot express this model",
        [*compressed_tensors.objections(model, known is not None), *_added(model), *_joined(model), *_untied(model)],
    )
    planned = None if known is None else engine_export.plan(model, known, str(engine), gpu)
    if planned is not None:
        _refuse(f"{engine} on {gpu} does not take this model", planned.objections)
    with _speaking(model, planned) as quantizer:
        model.save_pretrained(directory, **options)
    if not quantizer.sealed and options.get("is_main_process", True):  # a save in place, as of several ranks
        quantizer.seal(Path(directory))
    return Path(directory)


def _refuse(what: str, found: list[str]) -> None:
    if found:
        more = f"\n  and {len(found) - 3} more" if len(found) > 3 else ""
        raise FormatError(f"{what}:\n  " + "\n  ".join(found[:3]) + more + "\nor keep everything: format='mmqc'")


def _added(model: PreTrainedModel) -> Iterator[str]:
    """Parameters that the rewrites gave the model and its class does not build; a quantized KV cache."""
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, MmqcQuantizer):
        if quantizer.quantization_config.config.get("kv"):
            yield "its config quantizes the KV cache, which the format cannot do by modality: quantize the weights alone"
        for fqn in quantizer.differences(model):
            yield f"{fqn} is not what {type(model).__name__} builds there: quantize without rewrites (rotate=False)"


def _joined(model: PreTrainedModel) -> Iterator[str]:
    """Linears that the checkpoints of their family do not have as they are, and engines do not ask for."""
    linears = compressed_tensors.written_linears(model)
    plain = [name for name in model.state_dict() if name.rpartition(".")[0] not in linears]
    parts: dict[str, list[str]] = {}
    for name, whole in joined(model, [*plain, *(f"{fqn}.weight" for fqn in linears)]).items():
        parts.setdefault(whole, []).append(name.rpartition(".")[0])
    for whole, fqns in parts.items():
        if set(fqns) & set(linears):
            names = ", ".join(fqns)
            yield f"{names}: joined, cut or permuted to {whole} when they are saved, as floats can be: keep them in floating point"


def _untied(model: PreTrainedModel) -> Iterator[str]:
    """A head that was separated from the embedding where config.json cannot say so."""
    quantizer, cls = getattr(model, "hf_quantizer", None), type(model).__name__
    if isinstance(quantizer, MmqcQuantizer) and quantizer.quantization_config.untied and computes_by_flag(model):
        yield f"its head is untied, and {cls} computes by tie_word_embeddings: quantize without rewrites (rotate=False)"


class _CompressedTensors(MmqcQuantizer):
    """Gives transformers' ``save_pretrained`` the format's tensors."""

    sealed = False
    planned: engine_export.Plan | None = None

    def renames(self, model: PreTrainedModel, asked: bool = True) -> bool:
        """As asked: what would not be as engines expect it was refused."""
        return asked

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[Any, dict[str, Any]]:
        return compressed_tensors.state_dict(model, self.planned is not None), {}

    def seal(self, directory: Path) -> None:
        """Leaves the manifest, and what an engine will do, in a directory that was just written and is not yet in its place."""
        manifest.write(directory)
        if self.planned is not None:
            self.planned.write(directory)
        self.sealed = True


@contextmanager
def _speaking(model: PreTrainedModel, planned: engine_export.Plan | None) -> Iterator[_CompressedTensors]:
    """For as long as it saves, the model's config and quantizer are those of the format."""
    config, quantizer = model.config.quantization_config, model.hf_quantizer
    model.config.quantization_config = compressed_tensors.quantization_config(model, planned is not None)
    speaking = _CompressedTensors(config)
    speaking.planned = planned
    object.__setattr__(model, "hf_quantizer", speaking)
    try:
        yield speaking
    finally:
        model.config.quantization_config = config
        object.__setattr__(model, "hf_quantizer", quantizer)
