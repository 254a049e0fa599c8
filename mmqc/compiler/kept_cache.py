"""The static caches that ``compiled_loop`` keeps: they come in chunks of tokens, and a call takes one that has room.

A compiled forward depends on a cache in two ways.  CUDA graphs hold its addresses, so it must outlive the call.  And its length is
a size of its inputs: it is marked as one that changes (front/sizes.py), but for a step on a GPU, which is compiled for the length
that it finds, so most calls should find the same.

    room        the next multiple of 64 tokens, or of a quarter of the power of two below: at most a quarter is left empty;
                on a GPU at least ``LEAST`` tokens as far as ``SMALL`` bytes go
    used again  while it is at most four times what the call would get: attention reads all of it
    kept        one for each number of prompts, the last ones used, up to ``KEPT`` bytes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticCache, StaticLayer

from mmqc.kv.room import CHUNK, TIMES, room_for

LEAST, SMALL = 2048, 1 << 29
KEPT = 1 << 30


@dataclass(frozen=True)
class Kept:
    """A cache, and how many tokens it holds: layers that slide hold fewer."""

    cache: StaticCache
    room: int


class KeptCaches:
    """The caches of one model."""

    def __init__(self) -> None:
        self.caches: OrderedDict[Hashable, Kept] = OrderedDict()

    def ready(self, model: Any, new: StaticCache, batch: int, tokens: int, *, keep: bool) -> StaticCache:
        """An empty cache with its memory: what a compiled prefill allocates has no address that CUDA graphs may rely on.

        Args:
            model: who writes it.
            new: what it is like.
            batch: how many sequences there are.
            tokens: how long each of them may become.
            keep: whether later calls may have it; not if this call hands it out.
        """
        shape = model._get_static_cache_init_shape()
        if shape is None:
            return new
        heads, width = shape
        dtype, device = model.dtype, model.device  # each looks through the parameters
        key = (*map(type, new.layers), batch, heads, width, dtype, device)
        bytes_each = 2 * len(new.layers) * batch * heads * width * dtype.itemsize
        least = min(LEAST, SMALL // bytes_each // CHUNK * CHUNK) if device.type == "cuda" else 0
        room, kept = room_for(max(tokens, least)), self.caches.get(key) if keep else None
        if kept is not None and tokens <= kept.room <= TIMES * room:
            self.caches.move_to_end(key)
            empty(kept.cache)
            return kept.cache
        if type(new) is StaticCache and not getattr(new, "_is_user_defined", False):
            new = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=room)
        else:
            room = longest(new) + 1  # the last token of a sequence is not stored
        if keep:
            self.caches.pop(key, None)  # before its successor is allocated
        new.early_initialization(batch, heads, width, dtype, device)
        if keep:
            self.caches[key] = Kept(new, room)
            self._forget()
        return new

    def _forget(self) -> None:
        """Drop the caches that were not used for longest, but the last one."""
        sizes = {key: sum(t.nbytes for t in tensors(kept.cache)) for key, kept in self.caches.items()}
        for key in [*sizes][:-1]:
            if sum(sizes.values()) > KEPT:
                del self.caches[key], sizes[key]


def longest(cache: Any) -> int:
    """How many tokens the layer with most room holds."""
    return max(layer.max_cache_len for layer in cache.layers)


def tensors(cache: Any) -> list[Tensor]:
    """The keys, values and lengths of all layers."""
    return [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]


def empty(cache: Any) -> None:
    """``cache.reset()`` with one launch per dtype instead of three per layer."""
    if any(type(layer) is not StaticLayer for layer in cache.layers):
        cache.reset()
        return
    held = tensors(cache)
    for dtype in {t.dtype for t in held}:
        torch._foreach_zero_([t for t in held if t.dtype == dtype])
