"""Which of a checkpoint's modules make up a linear of vLLM's, and what vLLM has no place for.

...self_attn.qkv_proj   of   q_proj, k_proj, v_proj      one spec: their outputs one after the other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmqc.errors import MmqcError

LINEARS = ("quant_linear", "mixed_linear", "token_linear", "hadamard_linear")
NORMS = ("rms_norm", "rotated_norm")
LEFT_ALONE = ("plain_linear",)  # a float linear under nn.Linear's names
REFUSED = {
    "quant_experts": "mmqc has no experts for vLLM yet: quantize with keep=[...] for them, or serve with `mmqc serve`",
    "float4_linear": "vLLM has kernels of its own for it: save with format='compressed-tensors'",
    "kv_rounder": "vLLM's attention rounds no keys by head and token: quantize without kv_bits (kv_rounding=None)",
    "query_moment": "vLLM's cache knows no modalities: quantize without `| calibquant(...)`, or serve with `mmqc serve`",
    "adapted_linear": "its adapter is still beside the weight: merge it before saving (mmqc.load_adapter folds it in)",
}
OF_A_PART = ("out", "integer_scales", "modality")  # what linears that are joined may differ in
LAYOUTS = (1, 2)


class PluginError(MmqcError, ValueError):
    """A checkpoint, or a part of one, that vLLM cannot serve with mmqc's linears: names it, and what to do instead."""


def check(settings: Mapping[str, Any]) -> None:
    """Whether vLLM has a place for all that a ``quantization_config`` holds.

    Raises:
        PluginError: it has not; names the first module.
    """
    if settings.get("version", 1) not in LAYOUTS:
        raise PluginError(f"quantization_config.version = {settings['version']!r}: this mmqc reads {LAYOUTS}; update it")
    if not settings.get("modules"):
        raise PluginError("quantization_config has no modules; save with mmqc.save_pretrained(model, directory)")
    if settings.get("own_names"):
        raise PluginError(
            "the checkpoint has transformers' names for its tensors (quantization_config.own_names), and vLLM asks for what "
            "its family published; save with format='compressed-tensors', which names the linears to keep in floating point for it"
        )
    for fqn, spec in settings["modules"].items():
        kind = spec.get("kind")
        if kind in REFUSED:
            raise PluginError(f"{fqn} is a {kind}, and {REFUSED[kind]}")
        if kind not in (*LINEARS, *NORMS, *LEFT_ALONE):
            raise PluginError(f"{fqn} is a {kind!r}, which this mmqc does not know in vLLM; update it")
    if (settings.get("config") or {}).get("kv") is not None:
        raise PluginError(f"the checkpoint stores its KV cache by modality, and {REFUSED['query_moment']}")
    for fqn, change in (settings.get("parameters") or {}).items():
        what = "took away" if change is None else "gave a shape of its own"
        raise PluginError(f"the rewrites {what}: {fqn}, which vLLM's class has as it was; quantize without rewrites (rotate=False)")


def parts_of(name: str, packed: Mapping[str, Sequence[str]], modules: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The modules of mmqc's that vLLM's linear ``name`` is made of, in vLLM's order; none of one in floating point.

    Args:
        name: vLLM's.
        packed: vLLM's joined linears, by the last part of their name.
        modules: specs by vLLM's name.

    Raises:
        PluginError: some of its parts are quantized and others are not.
    """
    if name in modules:
        return [name] if modules[name]["kind"] in LINEARS else []
    parent, _, last = name.rpartition(".")
    wanted = [f"{parent}.{part}" if parent else part for part in packed.get(last, ())]
    found = [part for part in wanted if modules.get(part, {}).get("kind") in LINEARS]
    if found and len(found) < len(wanted):
        left = next(part for part in wanted if part not in found)
        raise PluginError(f"vLLM computes {name} in one product, and of its parts {left} is not quantized: {ALIKE}")
    return found


ALIKE = "quantize the parts alike (keep=[...] takes all of them or none)"


def joined(name: str, specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The spec of linears that read the same inputs, their outputs one after the other.

    Raises:
        PluginError: they differ in more than their outputs; names the key.
    """
    first = specs[0]
    for other in specs[1:]:
        keys = (set(first) | set(other)) - set(OF_A_PART)
        unlike = sorted(key for key in keys if first.get(key) != other.get(key))
        if unlike:
            key = unlike[0]
            raise PluginError(
                f"vLLM computes {name} in one product, and its parts differ in {key}: {first.get(key)!r} and {other.get(key)!r}; "
                f"{ALIKE}"
            )
    whole = {**first, "out": sum(spec["out"] for spec in specs)}
    scales = [spec.get("integer_scales", False) for spec in specs]
    if any(scales):
        whole["integer_scales"] = "int8" if all(s == "int8" for s in scales) else True
    return whole
