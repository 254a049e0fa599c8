"""A cache of transformers whose keys and values are the caller's tensors, written in place.

    prefill   K[:, :, :L] <- k,  attention over k alone              as without a cache
    step      K[:, :, p] <- k,   attention over K under a mask       p: where the token goes

Shapes:  K, V [B, H, S, D], S the capacity;  k, v [B, H, L, D];  p int64 [1]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor


def static_cache(keys: Sequence[Tensor], values: Sequence[Tensor], position: Tensor | None = None) -> Any:
    """A cache for one call: of a prompt, or of the token at ``position``."""
    from transformers.cache_utils import Cache

    return Cache(layers=[_layer()(k, v, position) for k, v in zip(keys, values, strict=True)])


def cached_tensors(cache: Any) -> tuple[list[Tensor], list[Tensor]] | str:
    """Keys and values of a filled cache by layer, or why it is more than keys and values."""
    layers = list(getattr(cache, "layers", ()))
    if not layers:
        return "the model returns no cache with layers"
    for number, layer in enumerate(layers):
        keys = getattr(layer, "keys", None)
        if not isinstance(keys, Tensor) or keys.dim() != 4:
            return f"layer {number} of the cache ({type(layer).__name__}) holds something other than keys and values"
    return [layer.keys for layer in layers], [layer.values for layer in layers]


@lru_cache
def _layer() -> type:
    from transformers.cache_utils import CacheLayerMixin

    class Given(CacheLayerMixin):
        """One layer."""

        def __init__(self, keys: Tensor, values: Tensor, position: Tensor | None) -> None:
            super().__init__()
            self.keys, self.values, self.position = keys, values, position
            self.dtype, self.device = keys.dtype, keys.device
            self.is_compileable = position is not None  # then no mask is left out because of values
            self.is_initialized = True

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            del key_states, value_states

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            del args, kwargs
            assert isinstance(self.keys, Tensor)
            assert isinstance(self.values, Tensor)
            if self.position is None:
                self.keys[:, :, : key_states.shape[2]] = key_states
                self.values[:, :, : value_states.shape[2]] = value_states
                return key_states, value_states
            self.keys.index_copy_(2, self.position, key_states)
            self.values.index_copy_(2, self.position, value_states)
            return self.keys, self.values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            assert isinstance(self.keys, Tensor)
            return (query_length if self.position is None else self.keys.shape[2]), 0

        def get_seq_length(self) -> Any:
            return 0 if self.position is None else self.position[0]

        def get_max_length(self) -> int:
            assert isinstance(self.keys, Tensor)
            return self.keys.shape[2]

    return Given
