"""``generate`` of a prepared model makes a packed cache wherever it would have made its default one.

    attach(model, spec)     the model's own ``_prepare_cache_for_generation``, one decision in front of it
    detach(model)           as it was

A cache that the caller passes, or asks for by ``cache_implementation``, is left to transformers.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from mmqc.config import KVSpec
from mmqc.kv.cache import SPEC, QuantizedCache, prepare
from mmqc.versions import cache_name

METHOD = "_prepare_cache_for_generation"


def prepare_cache(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, max_cache_length: int
) -> Any:
    """In place of the method of transformers' GenerationMixin."""
    asked = generation_config.cache_implementation not in (None, "dynamic") or generation_config.use_cache is False
    if not asked and model_kwargs.get(cache_name()) is None:
        model_kwargs[cache_name()] = QuantizedCache(self, max_cache_len=max_cache_length)
        return None
    return getattr(type(self), METHOD)(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)


def attach(model: nn.Module, spec: KVSpec) -> None:
    """From now on ``model.generate`` packs the visual part of its cache by ``spec``."""
    prepare(model)
    object.__setattr__(model, SPEC, spec)
    if hasattr(type(model), METHOD):
        object.__setattr__(model, METHOD, MethodType(prepare_cache, model))


def detach(model: nn.Module) -> None:
    """Undo ``attach``, but for the attention function, which with other caches changes nothing."""
    for name in (SPEC, METHOD):
        model.__dict__.pop(name, None)
