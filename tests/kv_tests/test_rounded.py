"""ResQ's keys and values as bytes: what is stored is what attention would have rounded to, token by token."""

import copy

import pytest
import torch
from models import tiny_qwen2_vl
from tolerance import assert_close

import mmqc
from mmqc.config import ConfigError, KVRounding, QuantConfig
from mmqc.kv import rounding as kv_rounding
from mmqc.ops.kv_rows import from_rows, row_bytes, to_rows

WAYS = [([14, 2], [4, 8]), ([13, 3], [3, 8]), ([16], [2]), ([9, 7], [5, 6]), ([1, 1], [4, 4])]


@pytest.mark.parametrize(("widths", "bits"), WAYS)
def test_kv_rows__come_back(widths: list[int], bits: list[int]) -> None:
    x = torch.randn(2, 3, 5, sum(widths))
    given = torch.ops.mmqc.quantize_per_token(x, None, widths, bits)
    rows = to_rows(*given, widths, bits)
    assert rows.shape == (2, 3, 5, row_bytes(widths, bits))
    assert rows.dtype == torch.uint8
    assert all(torch.equal(a, b) for a, b in zip(from_rows(rows, widths, bits), given, strict=True))
    some = from_rows(rows[:, :, 1:4:2], widths, bits)
    assert all(torch.equal(a, b[:, :, 1:4:2]) for a, b in zip(some, given, strict=True))


def test_kv_rows__size_of_a_head() -> None:
    assert row_bytes([112, 16], [4, 8]) == 56 + 16 + 16


@pytest.fixture(scope="module")
def rounded() -> tuple:
    model, inputs = tiny_qwen2_vl()
    config = QuantConfig(kv_rounding=KVRounding(4, 8, 1 / 8, "principal"))
    mmqc.quantize_(model, config, [inputs], progress=False)
    return model, inputs


def steps(model: torch.nn.Module, inputs: dict, cache: object, count: int = 4) -> torch.Tensor:
    """Logits of a prompt's last token and of some more, each the last one's most likely."""
    seen, given = [], dict(inputs)
    with torch.no_grad():
        for _ in range(count):
            out = model(**given, past_key_values=cache, use_cache=True)
            seen.append(out.logits[:, -1])
            given = {"input_ids": seen[-1].argmax(-1, keepdim=True)}
    return torch.stack(seen)


def test_rounded_cache__computes_what_rounding_at_every_read_computes(rounded: tuple) -> None:
    from transformers import DynamicCache

    model, inputs = rounded
    cache, plain = mmqc.RoundedCache(model), DynamicCache(config=model.config)
    assert_close(steps(model, inputs, cache), steps(model, inputs, plain))
    sizes = cache.sizes()
    heads, width = plain.layers[0].keys.shape[1], plain.layers[0].keys.shape[3]
    length = plain.get_seq_length()
    assert cache.get_seq_length() == length
    assert sizes["plain"] == 2 * 2 * width * heads * length * len(plain.layers)
    assert sizes["rows"] == 2 * row_bytes([width - width // 8, width // 8], [4, 8]) * heads * length * len(plain.layers)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the rows were attended to as they are, for every layer and step."""
    found, asked = [], kv_rounding.reads_rows
    monkeypatch.setattr(kv_rounding, "reads_rows", lambda *args: found.append(asked(*args)) or found[-1])
    return found


def test_rounded_cache__a_decode_step_attends_to_rows(rounded: tuple, reads: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = rounded
    got = steps(model, inputs, mmqc.RoundedCache(model))
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    assert reads == layers * [False] + 3 * layers * [True], "the prompt, then one token a step"
    monkeypatch.setattr(kv_rounding, "reads_rows", lambda *args: False)
    assert_close(got, steps(model, inputs, mmqc.RoundedCache(model)))


def test_rounded_cache__padding_is_attended_to_written_out(rounded: tuple, reads: list[bool]) -> None:
    from transformers import DynamicCache

    model, _ = rounded
    text = torch.arange(1, 13).reshape(2, 6)
    seen = torch.ones_like(text)
    seen[1, :2] = 0
    options = {"attention_mask": seen, "max_new_tokens": 3, "do_sample": False}
    got = model.generate(text, past_key_values=mmqc.RoundedCache(model), **options)
    assert not any(reads)
    assert torch.equal(got, model.generate(text, past_key_values=DynamicCache(config=model.config), **options))


def test_rounded_cache__two_bits_are_written_out(reads: list[bool]) -> None:
    model, inputs = tiny_qwen2_vl()
    mmqc.quantize_(model, QuantConfig(kv_rounding=KVRounding(2)), [inputs], progress=False)
    steps(model, inputs, mmqc.RoundedCache(model), 2)
    assert reads
    assert not any(reads)


def test_rounded_cache__rows_are_the_rounder_s_codes(rounded: tuple) -> None:
    model, inputs = rounded
    cache = mmqc.RoundedCache(model)
    steps(model, inputs, cache, 2)
    rounder = next(m for m in model.modules() if type(m).__name__ == "KVRounder")
    codes, scale, offset = from_rows(cache.layers[0].keys, rounder.widths, rounder.bits)
    low, high = codes.split(rounder.widths, -1)
    assert low.abs().max() <= 8
    assert high.abs().max() > 8
    ends = torch.cat([low.amin(-1, keepdim=True), high.amin(-1, keepdim=True)], -1)
    assert torch.equal(ends[..., 0], torch.full_like(ends[..., 0], -8)), "every token has its own range"
    assert (scale > 0).all()
    assert torch.isfinite(offset).all()


def test_rounded_cache__generates_beams_copies_and_crops(rounded: tuple) -> None:
    model, inputs = rounded
    for more in ({}, {"num_beams": 2}):
        options = {"max_new_tokens": 4, "do_sample": False, **more}
        expected = model.generate(**inputs, **options)
        got = model.generate(**inputs, past_key_values=mmqc.RoundedCache(model), **options)
        assert torch.equal(got, expected)
    cache = mmqc.RoundedCache(model)
    first = steps(model, inputs, cache, 1)
    prefix, length = copy.deepcopy(cache), cache.get_seq_length()
    token = {"input_ids": first[-1].argmax(-1, keepdim=True)}
    want = steps(model, token, prefix, 2)
    steps(model, token, cache, 1)
    cache.crop(-1)
    assert cache.get_seq_length() == length
    assert_close(steps(model, token, cache, 2), want)


def test_rounded_cache__refuses(rounded: tuple) -> None:
    plain, _ = tiny_qwen2_vl()
    with pytest.raises(ConfigError, match="rounds no keys and values"):
        mmqc.RoundedCache(plain)
    model, _ = rounded
    text = model.config.get_text_config(decoder=True)
    before, text._attn_implementation = text._attn_implementation, "eager"
    try:
        with pytest.raises(ConfigError, match="cannot read rounded tokens"):
            mmqc.RoundedCache(model)
    finally:
        text._attn_implementation = before
