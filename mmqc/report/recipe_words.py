"""A config in a line of words, e.g. "W4A8 gptq; scales by modality; rotated, online Hadamards, magnitude suppression"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmqc.config import QuantConfig, Scheme
from mmqc.report.tables import cache_bits


def recipe_words(config: QuantConfig | Mapping[str, Any]) -> str:
    """What is quantized and how, then what is rewritten; statistics are not read.

    Raises:
        ConfigError: a mapping that is no config of this version.
    """
    if not isinstance(config, QuantConfig):
        config = QuantConfig.from_dict({**config, "statistics": None})
    parts = [_schemes(config), ", ".join(_activations(config)), ", ".join(_rewrites(config)), ", ".join(_cache(config))]
    return "; ".join(part for part in parts if part) or "nothing quantized"


def _schemes(config: QuantConfig) -> str:
    """E.g. "W4A8 gptq", or "vision W8A8 rtn, language W4A8 gptq" where the towers differ."""
    named = {place: f"{scheme} {scheme.weight.solver}" for place, scheme in config.schemes.items()}
    whole = {"vision", "projector", "language"} == set(named)
    if whole and len(set(named.values())) == 1:
        return next(iter(named.values()))
    return ", ".join(f"{place} {words}" for place, words in named.items())


def _activations(config: QuantConfig) -> Iterator[str]:
    static = [s for s in config.schemes.values() if s.static]
    if static:
        yield "scales by modality" if any(_by_modality(s) for s in static) else "one scale a tensor"


def _by_modality(scheme: Scheme) -> bool:
    return scheme.activation is not None and scheme.activation.per_modality


def _rewrites(config: QuantConfig) -> Iterator[str]:
    asked = config.rewrites
    if asked.scales is not None:
        yield "channel scales"
    if asked.smooth is not None:
        yield f"smoothed by {asked.smooth:g}"
    if asked.rotate:
        yield "rotated"
    elif asked.fold_norms:
        yield "norms folded"
    if asked.bases is not None:
        yield {"variance": "principal bases", "peaks": "bases by peaks"}[asked.bases.by]
    if asked.hadamard:
        yield "online Hadamards"
    if asked.suppress:
        yield "magnitude suppression"


def _cache(config: QuantConfig) -> Iterator[str]:
    if config.kv is not None:
        yield f"visual KV cache in {cache_bits(config.kv)}"
        if config.kv.text_bits < 16:
            yield f"the rest of it in {config.kv.text_bits}"
    if config.kv_rounding is not None:
        yield f"keys and values rounded to {config.kv_rounding.bits} bits"
