"""The packed cache in a model, against transformers' own cache whose visual tokens were rounded by hand."""

import copy
from typing import Any

import pytest
import torch
from cache_steps import padded, round_visual, steps
from models import IMAGE, tiny_qwen2_vl
from tolerance import assert_close
from torch import Tensor
from transformers import DynamicCache

from mmqc import KVSpec, QuantizedCache
from mmqc.config import ConfigError

GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def vlm() -> tuple[Any, dict[str, Tensor]]:
    return tiny_qwen2_vl()


SPECS = {
    "1 bit": KVSpec(1, shrink_keys=0.5, shrink_values=0.3),
    "2 bits, values by token": KVSpec(2, values="token"),
    "4 bits": KVSpec(4),
    "8 bits": KVSpec(8),
    "1 and 4 bits": KVSpec(3, layer_bits=(1, 4), shrink_keys=0.5, shrink_values=0.3),
}


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_cache__decode_equals_a_plain_cache_with_rounded_tokens(vlm, name: str) -> None:
    model, batch = vlm
    ours, plain = QuantizedCache(model, SPECS[name]), DynamicCache()
    first, expected = (model(**batch, past_key_values=c, use_cache=True).logits for c in (ours, plain))
    assert torch.equal(first, expected), "prefill is exact"
    round_visual(plain, batch["input_ids"] == IMAGE, SPECS[name])
    tokens = torch.randint(10, 400, (1, 4))
    assert_close(steps(model, ours, tokens), steps(model, plain, tokens))


@torch.no_grad()
def test_cache__a_second_turn_with_another_image(vlm) -> None:
    model, batch = vlm
    spec = KVSpec(2)
    ours, plain = QuantizedCache(model, spec), DynamicCache()
    visual = batch["input_ids"] == IMAGE
    logits, length = {}, visual.shape[1]
    position = torch.arange(length, 2 * length).expand(3, 1, -1)
    for cache in (ours, plain):
        model(**batch, past_key_values=cache, use_cache=True)
        if cache is plain:
            round_visual(plain, visual, spec)
        again = {**batch, "attention_mask": None, "position_ids": position}
        logits[cache] = model(**again, past_key_values=cache, use_cache=True).logits
    assert_close(logits[ours], logits[plain])
    round_visual(plain, visual, spec, length)
    tokens = torch.randint(10, 400, (1, 3))
    assert_close(steps(model, ours, tokens), steps(model, plain, tokens))
    assert len(ours.packed[0].segments) == 2


def test_generate__padded_rows_are_answered_as_alone(vlm) -> None:
    model, batch = vlm
    spec, both = KVSpec(1, shrink_keys=0.6, shrink_values=0.6, tau=((1, 2),)), padded(vlm[1])
    got = model.generate(**both, **GREEDY, past_key_values=QuantizedCache(model, spec))
    alone = {k: v[:, 5:] if v.shape[:2] == batch["input_ids"].shape else v for k, v in batch.items()}
    for row, inputs in ((0, batch), (1, alone)):
        want = model.generate(**inputs, **GREEDY, past_key_values=QuantizedCache(model, spec))
        assert torch.equal(got[row, -6:], want[0, -6:])


def test_generate__text_alone_and_beams_are_those_of_the_plain_cache(vlm) -> None:
    model, batch = vlm
    text = {"input_ids": batch["input_ids"][:, :7]}
    for more in (GREEDY, {**GREEDY, "num_beams": 3}):
        want = model.generate(**text, **more)
        assert torch.equal(model.generate(**text, **more, past_key_values=QuantizedCache(model, KVSpec(1))), want)
    want = model.generate(**batch, **GREEDY, num_beams=3)
    assert torch.equal(model.generate(**batch, **GREEDY, num_beams=3, past_key_values=QuantizedCache(model, KVSpec(8))), want)


@torch.no_grad()
def test_cache__crop_copy_and_rows(vlm) -> None:
    model, batch = vlm
    both, spec = padded(batch), KVSpec(2, tau=((0, 1),))
    cache = QuantizedCache(model, spec)
    model(**both, past_key_values=cache, use_cache=True)
    tokens, mask = torch.randint(10, 400, (2, 3)), both["attention_mask"]
    prefix = copy.deepcopy(cache)
    assert prefix.shared.context is cache.shared.context
    want = steps(model, cache, tokens, mask)
    assert torch.equal(steps(model, prefix, tokens, mask), want)
    for amount in (-2, mask.shape[1] + 1):
        cache.crop(amount)
        assert int(cache.get_seq_length()) == mask.shape[1] + 1
        assert torch.equal(steps(model, cache, tokens[:, 1:], torch.cat((mask, mask[:, -1:]), 1)), want[:, 1:])
    cache.crop(-3)
    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    assert_close(steps(model, swapped, tokens.flip(0), mask.flip(0)).flip(0), want)
    one = copy.deepcopy(cache)
    one.batch_select_indices(torch.tensor([1]))
    one.batch_repeat_interleave(2)
    assert_close(steps(model, one, tokens[1:].repeat(2, 1), mask[1:].repeat(2, 1)), want[1:].repeat(2, 1, 1))
    cache.reset()
    model(**both, past_key_values=cache, use_cache=True)
    assert torch.equal(steps(model, cache, tokens, mask), want)


@torch.no_grad()
def test_cache__crop_into_the_images(vlm) -> None:
    model, batch = vlm
    spec, cut = KVSpec(4), 11
    cache, plain = QuantizedCache(model, spec), DynamicCache()
    for c in (cache, plain):
        model(**batch, past_key_values=c, use_cache=True)
    round_visual(plain, batch["input_ids"] == IMAGE, spec)
    removed = cut - batch["input_ids"].shape[1]
    cache.crop(removed)
    plain.crop(removed)
    tokens = torch.randint(10, 400, (1, 2))
    assert_close(steps(model, cache, tokens), steps(model, plain, tokens))


def test_cache__sizes_and_errors(vlm) -> None:
    model, batch = vlm
    cache = QuantizedCache(model, KVSpec(1))
    with torch.no_grad():
        model(**batch, past_key_values=cache, use_cache=True)
    visual, heads, width, layers = int((batch["input_ids"] == IMAGE).sum()), 2, 16, 2
    words = 2 * -(-visual // 16) * width * heads
    assert cache.sizes()["visual"] == layers * 2 * (words + 2 * 4 * heads * width) + layers * 4
    assert cache.sizes()["visual_plain"] == layers * 2 * 2 * visual * heads * width
    with pytest.raises(ConfigError, match="no kv config"):
        QuantizedCache(model)
    with pytest.raises(ConfigError, match="3 pairs for a model of 2 layers"):
        QuantizedCache(model, KVSpec(1, tau=((0, 0),) * 3))
    other = copy.deepcopy(model)
    cache = QuantizedCache(other, KVSpec(1))
    other.model.language_model.config._attn_implementation = "sdpa"
    with pytest.raises(AttributeError, match="mmqc_packed_kv"):
        other(**batch, past_key_values=cache, use_cache=True)
