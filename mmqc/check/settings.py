"""What a checkpoint's config says beside its linears: the cache, transforms, towers, and how much is quantized at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmqc.check.finding import Finding, several
from mmqc.check.linears import HEAD, Part, Whole
from mmqc.check.stored import Stored
from mmqc.engines.names import matches

HALF = 0.5
LARGEST_HADAMARD = 32768


def settings(stored: Stored, wholes: Iterable[Whole], tensor_parallel: int) -> Iterator[Finding]:
    """All findings of this kind."""
    parts = [part for whole in wholes for part in whole.parts]
    yield from _cache(stored)
    yield from _transforms(stored, parts, tensor_parallel)
    yield from _share(parts)
    yield from _tower(stored, parts)


def _cache(stored: Stored) -> Iterator[Finding]:
    scheme = stored.quantization.get("kv_cache_scheme")
    if not scheme:
        return
    bits, kind, strategy = scheme.get("num_bits"), scheme.get("type"), scheme.get("strategy", "tensor")
    if kind != "float" or bits != 8:
        yield Finding("error", "cache", "kv_cache_scheme", f"{bits} bits of type {kind}: vLLM takes 8 of type float")
    elif strategy not in ("tensor", "attn_head") or not scheme.get("symmetric", True):
        yield Finding("error", "cache", "kv_cache_scheme", f"strategy {strategy}: vLLM takes tensor and attn_head, symmetric")
    else:
        modules = {name.rpartition(".")[0].rpartition(".")[2] for name in stored.tensors}
        if not modules & {"q_norm", "k_norm", "q_layernorm", "k_layernorm"}:
            text = (
                "a float8 cache, and no norms of queries and keys, which then have outliers: compare answers with the float model "
                "before serving, or leave it out"
            )
            yield Finding("warning", "cache", "kv_cache_scheme", text)
        if not scheme.get("dynamic") and not any(name.endswith(".k_scale") for name in stored.tensors):
            yield Finding("warning", "cache", "kv_cache_scheme", "there are no k_scale tensors: vLLM takes scales of 1")


def _transforms(stored: Stored, parts: list[Part], tensor_parallel: int) -> Iterator[Finding]:
    groups = (stored.quantization.get("transform_config") or {}).get("config_groups") or {}
    for name, group in groups.items():
        online = [a for a in group.get("apply", ()) if a.get("location") in ("input", "output")]
        if any(a.get("location") in ("q_attn", "k_cache") for a in group.get("apply", ())):
            yield Finding("error", "transform", name, "vLLM transforms inputs and outputs of linears, no queries or caches")
        if not online:
            continue
        if tensor_parallel > 1:
            yield Finding("error", "transform", name, f"vLLM has no transforms at run time on {tensor_parallel} GPUs")
        size = group.get("head_dim")
        if group.get("type") == "hadamard" and size and (size & (size - 1) or size > LARGEST_HADAMARD):
            yield Finding("error", "transform", name, f"a Hadamard of {size}: vLLM's have powers of two up to {LARGEST_HADAMARD}")
        yield from _targets_of_transform(name, online, parts)


def _targets_of_transform(name: str, online: list[Mapping[str, Any]], parts: list[Part]) -> Iterator[Finding]:
    targets = [t for a in online for t in a.get("targets", ())]
    for target in targets:
        if "." in target and not target.startswith("re:"):
            text = f"target {target!r}: vLLM renames no targets of transforms; write it as a pattern ('re:.*...')"
            yield Finding("error", "transform", name, text)
    biased = [
        p.name for p in parts if "bias" in p.entries and any(t.startswith("re:") and matches(p.engine_name, t) for t in targets)
    ]
    yield from several("error", "transform", biased, "vLLM transforms no linear that has a bias")


def _share(parts: list[Part]) -> Iterator[Finding]:
    language = [p for p in parts if not p.tower and HEAD not in p.name]
    whole = sum(p.parameters for p in language)
    quantized = sum(p.parameters for p in language if p.stored)
    if not quantized:
        yield Finding("error", "share", "the checkpoint", "no linear of the language model is quantized")
    elif quantized < HALF * whole:
        text = f"{quantized / whole:.0%} of the language model's linear weights are quantized; is a pattern too wide?"
        yield Finding("warning", "share", "the checkpoint", text)


def _tower(stored: Stored, parts: list[Part]) -> Iterator[Finding]:
    """A tower that nobody named: it was quantized because it has linears."""
    deliberate = any((stored.directory / name).exists() for name in ("mmqc_engine.json", "mmqc_manifest.json"))
    caught = [p.name for p in parts if p.tower and p.stored and p.target in ("Linear", "LinearBase", "stored")]
    if not deliberate:
        text = "the vision tower is quantized, and the config does not name it; if that is meant, compare answers about images"
        yield from several("warning", "tower by accident", caught, text)
