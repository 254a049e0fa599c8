"""A decoder with sliding windows: layers with full attention are packed, the others are transformers' own."""

from typing import Any

import pytest
import torch
from cache_steps import round_visual
from tiny_families import FAMILIES
from tolerance import assert_close
from transformers import DynamicCache

import mmqc.kv.cache
from mmqc import KVSpec, QuantizedCache

SEEN_AS_IMAGE = 7
SPECS = {"packed": KVSpec(2), "text rounded, too": KVSpec(1, text_bits=8, text_window=64, text_block=8)}


def decoder() -> tuple[Any, torch.Tensor]:
    """Gemma 3's text decoder, window 8, one token id of which counts as visual; and a prompt of 20 tokens."""
    model, _ = FAMILIES["gemma3_text"]()
    context = mmqc.kv.cache.prepare(model)
    context.visual_token_ids, context.text_only = (SEEN_AS_IMAGE,), False
    ids = torch.randint(10, 60, (2, 20))
    ids[:, 4:13] = SEEN_AS_IMAGE
    return model, ids


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_sliding__decode_beyond_the_window_and_rows(name: str, offloading: bool) -> None:
    model, ids = decoder()
    spec = SPECS[name]
    ours, plain = QuantizedCache(model, spec, offloading=offloading), DynamicCache(config=model.config)
    assert [type(layer).__name__ for layer in ours.layers] == ["StaticSlidingWindowLayer", "PackedLayer"]
    first, want = (model(input_ids=ids, past_key_values=c, use_cache=True).logits for c in (ours, plain))
    assert_close(first, want)
    packed = DynamicCache()
    packed.layers = plain.layers[1:]
    round_visual(packed, ids == SEEN_AS_IMAGE, spec)
    tokens = torch.randint(10, 60, (2, 12))
    position = lambda c, t: {"position_ids": torch.full((2, 1), int(c.get_seq_length(1))), "input_ids": t}  # noqa: E731
    for i in range(12):
        if i == 6:
            ours.reorder_cache(torch.tensor([1, 0]))
            plain.reorder_cache(torch.tensor([1, 0]))
        got, want = (model(**position(c, tokens[:, i : i + 1]), past_key_values=c, use_cache=True).logits for c in (ours, plain))
        assert_close(got, want)


@torch.no_grad()
def test_sliding__crop_is_refused_and_reset_is_not() -> None:
    model, ids = decoder()
    cache = QuantizedCache(model, KVSpec(4))
    first = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    with pytest.raises(ValueError, match="what the window left behind is gone"):
        cache.crop(-2)
    assert not cache.is_croppable
    cache.reset()
    assert torch.equal(model(input_ids=ids, past_key_values=cache, use_cache=True).logits, first)
