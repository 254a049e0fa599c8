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

OfLayers = int | tuple[int, ...]  # of all layers, or of each where they differ


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

        Where only a forward tells what a layer stores (heads of several widths, states of linear attention), it gets its memory in
        the first, which ``has_memory`` tells of, and keeps it.

        Args:
            model: who writes it.
            new: what it is like.
            batch: how many sequences there are.
            tokens: how long each of them may become.
            keep: whether later calls may have it; not if this call hands it out.
        """
        if on_several_devices(model):
            return new
        shape = shape_of_all(model)
        dtype, device = model.dtype, model.device  # each looks through the parameters
        key = (*map(type, new.layers), batch, shape, dtype, device)
        least = 0
        if device.type == "cuda" and shape is not None:
            bytes_each = 2 * batch * entries(shape, len(new.layers)) * dtype.itemsize
            least = min(LEAST, SMALL // bytes_each // CHUNK * CHUNK)
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
        if shape is not None:
            heads, width = (of if isinstance(of, int) else [*of] for of in shape)
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


def on_several_devices(model: Any) -> bool:
    """Whether layers of one model are."""
    return len({*(getattr(model, "hf_device_map", None) or {}).values()}) > 1


def shape_of_all(model: Any) -> tuple[OfLayers, OfLayers] | None:
    """(Heads, their width) of keys and values; None where only a forward tells."""
    try:
        shape = model._get_static_cache_init_shape()
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError of some versions: layers differ (Gemma 4)
        return None
    if shape is None:
        return None
    heads, width = (tuple(of) if isinstance(of, list) else of for of in shape)
    return heads, width


def entries(shape: tuple[OfLayers, OfLayers], layers: int) -> int:
    """Keys of one token, in all layers."""
    heads, width = ((of,) * layers if isinstance(of, int) else of for of in shape)
    return sum(h * w for h, w in zip(heads, width, strict=True))


def longest(cache: Any) -> int:
    """How many tokens the layer with most room holds."""
    return max(getattr(layer, "max_cache_len", 0) for layer in cache.layers)


def has_memory(cache: Any) -> bool:
    """Whether every layer has: of linear attention, some state."""
    return all(layer.is_initialized if hasattr(layer, "is_initialized") else stored(layer) for layer in cache.layers)


def attends(cache: Any) -> bool:
    """Whether all that layers store are keys and values."""
    return all(hasattr(layer, "is_initialized") for layer in cache.layers)


def check_lengths(model: Any, cache: Any, tokens: int) -> None:
    """Whether each layer of a cache that was empty keeps as many tokens as the prompt had.

    Raises:
        ValueError: one does not: cross-attention has appended its keys (BLIP), to which every next token would attend.
    """
    lengths = [getattr(layer, "cumulative_length", None) for layer in cache.layers if type(layer) is StaticLayer]
    wrong = {int(length) for length in lengths if isinstance(length, Tensor)} - {tokens}
    if wrong:
        raise ValueError(
            f"{type(model).__name__} has stored {max(wrong)} tokens in its static cache for a prompt of {tokens}: keys of its "
            "cross-attention lie among those of the text, so that what it says would be wrong; leave custom_generate and "
            'cache_implementation="static" out'
        )


def stored(layer: Any) -> list[Tensor]:
    """Its keys, values and lengths, or the states of linear attention."""
    values = [each for value in vars(layer).values() for each in (value.values() if isinstance(value, dict) else (value,))]
    return [t for t in values if isinstance(t, Tensor)]


def tensors(cache: Any) -> list[Tensor]:
    """What all layers store."""
    return [t for layer in cache.layers for t in stored(layer)]


def empty(cache: Any) -> None:
    """``cache.reset()`` with one launch per dtype instead of three per layer."""
    if any(type(layer) is not StaticLayer for layer in cache.layers):
        cache.reset()
        return
    held = tensors(cache)
    for dtype in {t.dtype for t in held}:
        torch._foreach_zero_([t for t in held if t.dtype == dtype])
