"""A step's attention mask is the last step's with one token more, where transformers makes it anew in front of every step.

    transformers    2D mask [B, n] ── some 25 operations ──► bool [B, 1, 1, S]
    here            the last step's bool [B, 1, 1, S] ── one operation: its column n - 1 is shown ──► the same

Why:     each of those operations is a launch of its own between two tokens, and the device waits for the host meanwhile.
Exact:   token n - 1 lies in column n - 1 of the cache, causality shows what is in front of it, and ``generate`` pads no new token.
Packed:  a quantized cache (kv/cache.py) knows by itself what its tokens may see; a step's mask is of the new token alone,
         [B, 1, 1, 1], and stays.
Not:     a prompt in chunks, whose tokens may be padding; models with layers other than full attention, or with a mask of their own
         making; attention other than sdpa, or that of a quantized cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.generation import utils as generation

from mmqc.kv.cache import QuantizedCache
from mmqc.versions import cache_name

NAME = "create_masks_for_generate"
_loop: ContextVar[_Loop | None] = ContextVar("the loop whose steps go on with a mask", default=None)


class _Loop:
    """The mask of one loop's steps, by kind of layer where transformers gives several."""

    def __init__(self, cache: StaticCache | QuantizedCache, prompt: int | None = None) -> None:
        self.cache, self.prompt = cache, prompt
        self.packed = isinstance(cache, QuantizedCache)
        self.seen = 0
        self.last: Any = None

    def place(self, attention_mask: Tensor | None) -> int:
        """Which token of its sequences a step's is: as long as the mask of padding, else one more than the last."""
        return attention_mask.shape[1] if attention_mask is not None else (self.seen or self.prompt or 0) + 1

    def mask(self, seen: int, make: Callable[[], Any]) -> Any:
        """That of the step which is the ``seen``-th token of its sequences; ``make`` makes one anew."""
        masks = self.shown()
        if seen != self.seen + 1 or not masks or (self.packed and any(m.shape[-1] > 1 for m in masks)):
            made = make()  # of one piece of memory: without padding, the rows of some versions are one row, expanded
            self.last = {kind: _whole(m) for kind, m in made.items()} if isinstance(made, dict) else _whole(made)
        elif not self.packed:
            for mask in masks:
                mask[..., seen - 1] = True
        self.seen = seen
        return self.last

    def shown(self) -> list[Tensor]:
        """The last step's masks, if each is one of booleans; else none."""
        masks = list(self.last.values()) if isinstance(self.last, dict) else [self.last]
        return masks if all(isinstance(m, Tensor) and m.dtype == torch.bool for m in masks) else []


def is_mask_of_loop(value: Any) -> bool:
    """Whether ``value`` is what ``next_mask`` moves on."""
    loop = _loop.get()
    if loop is None or value is None or not loop.shown():
        return False
    if isinstance(value, dict) and isinstance(loop.last, dict):  # newer versions put the masks into a dict of their own
        return value.keys() == loop.last.keys() and all(value[kind] is mask for kind, mask in loop.last.items())
    return value is loop.last


def next_mask() -> None:
    """Show one token more, as the next step's mask would, in the mask that the last step had."""
    loop = _loop.get()
    if loop is not None and loop.shown():
        loop.mask(loop.seen + 1, lambda: loop.last)


def mask_lies_in(place: Any) -> None:
    """From now on the mask that goes on is this one, which equals it."""
    loop = _loop.get()
    assert loop is not None
    loop.last = place


@contextmanager
def masks_go_on(cache: Any, prompt: int | None = None) -> Iterator[None]:
    """Steps of this thread that write to ``cache`` go on with the last one's mask, where that is the same.

    Args:
        cache: the loop's.
        prompt: tokens of the prompt, if known; newer versions of transformers tell a step's place only where something is padded.
    """
    _teach()
    token = _loop.set(_Loop(cache, prompt) if isinstance(cache, StaticCache | QuantizedCache) else None)
    try:
        yield
    finally:
        _loop.reset(token)


@functools.cache
def _teach() -> None:
    """Ask us first wherever ``generate`` makes a mask."""
    original = getattr(generation, NAME, None)
    if original is None:  # a transformers that makes them elsewhere: as correct, and slower
        return

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        loop = _loop.get()
        if loop is None or args or not _is_plain_step(loop, **kwargs):
            return original(*args, **kwargs)
        return loop.mask(loop.place(kwargs["attention_mask"]), lambda: original(*args, **kwargs))

    setattr(generation, NAME, create)


def _is_plain_step(
    loop: _Loop, config: Any = None, inputs_embeds: Any = None, attention_mask: Any = None,
    is_first_iteration: bool = False, **more: Any,
) -> bool:  # fmt: skip
    """Whether a mask is that of one new token a sequence, of which causality and padding say all."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    full = {*kinds} == {"full_attention"} if kinds else not (_of(text, "sliding_window") or _of(text, "attention_chunk_size"))
    cache = more.pop(cache_name(), None)
    known = more.keys() <= {"position_ids", "block_sequence_ids", "token_type_ids", "mm_token_type_ids"}
    padded = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
    return (
        full
        and known
        and more.get("block_sequence_ids") is None
        and cache is loop.cache
        and (loop.packed or getattr(text, "_attn_implementation", None) == "sdpa")
        and not is_first_iteration
        and (padded or (attention_mask is None and bool(loop.prompt)))
        and inputs_embeds.shape[1] == 1
        and (loop.packed or loop.place(attention_mask) <= loop.cache.layers[0].max_cache_len)  # type: ignore[attr-defined]
    )


def _whole(mask: Any) -> Any:
    return mask.contiguous() if isinstance(mask, Tensor) else mask


def _of(config: Any, name: str) -> Any:
    return getattr(config, name, None)
