"""Text and generated tokens in 8 and 4 bits behind a window, against a plain cache whose older text was rounded by hand."""

import copy
from typing import Any

import pytest
import torch
from cache_steps import padded, round_visual, steps
from counted_graphs import compiled, counting
from models import IMAGE, tiny_qwen2_vl
from tolerance import assert_close
from torch import Tensor
from transformers import DynamicCache

import mmqc
from mmqc import KVSpec, QuantizedCache
from mmqc.config import ConfigError

GREEDY = {"max_new_tokens": 9, "do_sample": False}


@pytest.fixture(scope="module")
def vlm() -> tuple[Any, dict[str, Tensor]]:
    return tiny_qwen2_vl()


def rounded(x: Tensor, bits: int, block: int) -> Tensor:
    """One token's channels [D]."""
    out = []
    for part in x.split(block):
        step = (part.max() - part.min()) / (2**bits - 1)
        out.append(((part - part.min()) / step).round() * step + part.min())
    return torch.cat(out)


class ByHand:
    """A DynamicCache; ``kinds`` bool [B, L] says which of its tokens are text."""

    def __init__(self, model: Any, spec: KVSpec):
        self.model, self.spec, self.cache = model, spec, DynamicCache()
        self.text: Tensor | None = None
        self.done: set[tuple[int, int]] = set()

    def add(self, text: Tensor) -> None:
        self.text = text if self.text is None else torch.cat((self.text, text), 1)

    def round(self, coming: int = 0) -> None:
        """Round the text that is older than the window when ``coming`` more tokens are there."""
        assert self.text is not None
        for b, row in enumerate(self.text):
            at = row.nonzero()[:, 0].tolist()
            for i in at[: max(0, len(at) + coming - self.spec.text_window)]:
                if (b, i) not in self.done:
                    self.done.add((b, i))
                    for layer in self.cache.layers:
                        for t in (layer.keys, layer.values):
                            for h in range(t.shape[1]):
                                t[b, h, i] = rounded(t[b, h, i], self.spec.text_bits, self.spec.text_block)

    def steps(self, tokens: Tensor, mask: Tensor) -> Tensor:
        out = []
        for i in range(tokens.shape[1]):
            self.round(1)
            seen = torch.cat((mask, mask.new_ones(mask.shape[0], i)), 1)
            out.append(steps(self.model, self.cache, tokens[:, i : i + 1], seen))
            self.add(torch.ones(tokens.shape[0], 1, dtype=torch.bool))
        return torch.cat(out, 1)


def prompt(model: Any, batch: dict[str, Tensor], spec: KVSpec) -> tuple[QuantizedCache, ByHand]:
    """Both caches behind the prompt."""
    ours, plain = QuantizedCache(model, spec), ByHand(model, spec)
    first, expected = (model(**batch, past_key_values=c, use_cache=True).logits for c in (ours, plain.cache))
    assert torch.equal(first, expected), "prefill is exact"
    visual = batch["input_ids"] == IMAGE
    round_visual(plain.cache, visual, spec)
    plain.add(~visual & batch["attention_mask"].bool())
    plain.round()
    return ours, plain


@pytest.mark.parametrize(("bits", "window"), [(8, 1), (4, 3), (8, 6), (4, 40)])
@torch.no_grad()
def test_cache__decode_equals_a_plain_cache_with_rounded_text(vlm, bits: int, window: int) -> None:
    model, batch = vlm
    spec, batch = KVSpec(2, text_bits=bits, text_window=window, text_block=8), padded(batch)
    ours, plain = prompt(model, batch, spec)
    tokens = torch.randint(10, 400, (2, 8))
    assert_close(steps(model, ours, tokens, batch["attention_mask"]), plain.steps(tokens, batch["attention_mask"]))


@torch.no_grad()
def test_cache__a_second_turn_and_crop(vlm) -> None:
    model, batch = vlm
    spec, batch = KVSpec(4, text_bits=4, text_window=5, text_block=16), padded(batch)
    ours, plain = prompt(model, batch, spec)
    mask, tokens = batch["attention_mask"], torch.randint(10, 400, (2, 7))
    turn, length = torch.randint(10, 400, (2, 9)), mask.shape[1]
    mask = torch.cat((mask, mask.new_ones(2, 9)), 1)
    position = torch.arange(length, length + 9).expand(3, 2, -1)
    got, want = (
        model(input_ids=turn, attention_mask=mask, position_ids=position, past_key_values=c, use_cache=True).logits
        for c in (ours, plain.cache)
    )
    assert_close(got, want)
    plain.add(torch.ones(2, 9, dtype=torch.bool))
    plain.round()
    assert_close(steps(model, ours, tokens, mask), plain.steps(tokens, mask))
    for removed in (2, 4):  # tokens that come back into the window keep their rounding
        ours.crop(-removed)
        plain.cache.crop(-removed)
        assert plain.text is not None
        plain.text = plain.text[:, :-removed]
        plain.done = {(b, i) for b, i in plain.done if i < plain.text.shape[1]}
        seen = torch.cat((mask, mask.new_ones(2, plain.text.shape[1] - mask.shape[1])), 1)
        assert_close(steps(model, ours, tokens[:, :3], seen), plain.steps(tokens[:, :3], seen))


@torch.no_grad()
def test_cache__rows_that_change_places(vlm) -> None:
    model, batch = vlm
    spec, batch = KVSpec(2, text_bits=4, text_window=4, text_block=16), padded(batch)
    ours, _ = prompt(model, batch, spec)
    mask, tokens = batch["attention_mask"], torch.randint(10, 400, (2, 6))
    swapped, one = copy.deepcopy(ours), copy.deepcopy(ours)
    want = steps(model, ours, tokens, mask)
    swapped.reorder_cache(torch.tensor([1, 0]))
    assert_close(steps(model, swapped, tokens.flip(0), mask.flip(0)).flip(0), want)
    one.batch_select_indices(torch.tensor([1]))
    one.batch_repeat_interleave(2)
    assert_close(steps(model, one, tokens[1:].repeat(2, 1), mask[1:].repeat(2, 1)), want[1:].repeat(2, 1, 1))
    ours.reset()
    model(**batch, past_key_values=ours, use_cache=True)
    assert torch.equal(steps(model, ours, tokens, mask), want)


def test_generate__beams_and_one_graph(vlm) -> None:
    model, batch = vlm
    spec = KVSpec(8, text_bits=8, text_window=3, text_block=8)
    want = model.generate(**batch, **GREEDY, num_beams=3)
    assert torch.equal(model.generate(**batch, **GREEDY, num_beams=3, past_key_values=QuantizedCache(model, spec)), want)
    torch._dynamo.reset()
    length = batch["input_ids"].shape[1] + 9
    backend, graphs = counting()
    eagerly = model.generate(**batch, **GREEDY, past_key_values=QuantizedCache(model, spec), disable_compile=True)
    cache = QuantizedCache(model, spec, max_cache_len=length)
    got = model.generate(**batch, **{**compiled(backend), "max_new_tokens": 9}, past_key_values=cache)
    assert torch.equal(got, eagerly)
    assert len(graphs) == 1


def test_cache__sizes_of_rounded_text_and_errors(vlm) -> None:
    model, batch = vlm
    spec = KVSpec(1, text_bits=4, text_window=3, text_block=8)
    cache = QuantizedCache(model, spec, max_cache_len=batch["input_ids"].shape[1])
    with torch.no_grad():
        model(**batch, past_key_values=cache, use_cache=True)
    text, heads, width, layers, size = int((batch["input_ids"] != IMAGE).sum()), 2, 16, 2, 4
    token = width // 2 + 2 * size * width // 8  # codes, and a scale and an offset of each block in the model's dtype
    assert cache.sizes()["text"] == layers * 2 * heads * (4 * width * size + (1 + text - 3) * token)
    with pytest.raises(ConfigError, match="text_block does not fit this model: block = 32"):
        QuantizedCache(model, KVSpec(1, text_bits=8))
    with pytest.raises(ConfigError, match="text_block does not fit"):
        mmqc.quantize_(model, mmqc.QuantConfig(kv=KVSpec(8, text_bits=8)), progress=False)
    for field, value in (("text_bits", 2), ("text_window", 0), ("text_block", 0)):
        with pytest.raises(ConfigError, match=f"KVSpec.{field}"):
            KVSpec(**{field: value})
