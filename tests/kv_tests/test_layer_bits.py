"""Bits of a packed cache layer by layer: the cheapest that a budget allows, from what each layer's rounding costs."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from torch import Tensor

import mmqc
from mmqc import ConfigError, KVSpec, QuantizedCache
from mmqc.calibration.calibrate import CalibrationError
from mmqc.kv import calibrate as calibrate_kv
from mmqc.kv import layer_bits
from mmqc.kv.query_moment import moment_of
from mmqc.recipes import calibquant
from mmqc.specs import KV_BITS

GREEDY = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(scope="module")
def vlm() -> tuple[Any, dict[str, Tensor]]:
    return tiny_qwen2_vl()


@pytest.mark.parametrize("mean", [1, 2, 3, 7, 8])
def test_cheapest__is_that_of_all_ways(mean: int) -> None:
    g = torch.Generator().manual_seed(mean)
    costs = [dict(zip(KV_BITS, torch.rand(4, generator=g).tolist(), strict=True)) for _ in range(4)]

    def cost(bits: tuple[int, ...]) -> float:
        return sum(layer[b] for layer, b in zip(costs, bits, strict=True))

    found = layer_bits.cheapest(costs, mean * 4)
    assert sum(found) <= mean * 4
    assert cost(found) == min(cost(ways) for ways in product(KV_BITS, repeat=4) if sum(ways) <= mean * 4)


def costly_where(layer: int, price: float) -> Any:
    """Divergences of a model whose ``layer`` alone pays for rounding; two layers below 8 bits cost more than their sum."""

    def divergences(model: Any, candidates: list[KVSpec], *_: Any) -> Tensor:
        rounded = [[8 - b for b in spec.layer_bits] for spec in candidates]
        return torch.tensor([lost[layer] + price * math.prod(lost) for lost in rounded], dtype=torch.float64)

    return divergences


@pytest.mark.parametrize(
    ("bits", "price", "found"),
    [
        (2, 0.0, (2, 1)),  # (2, 2) costs the same, and more of nothing is not taken
        (3, 0.0, (4, 1)),
        (5, 0.0, (8, 1)),
        (4, 0.0, (4, 1)),
        (4, 1.0, (4, 4)),  # costs do not add up: measured together, four bits everywhere are better
    ],
)
def test_search__bits_go_where_they_count(vlm, monkeypatch: pytest.MonkeyPatch, bits: int, price: float, found: Any) -> None:
    model, batch = vlm
    monkeypatch.setattr(calibrate_kv, "divergences", costly_where(0, price))
    spec, context = KVSpec(bits, by_layer=True, tau=((0, 1),)), mmqc.kv.cache.prepare(model)
    got = layer_bits.search_bits(model, spec, [batch], context)
    assert got == KVSpec(bits, by_layer=True, layer_bits=found, tau=((0, 1),))
    assert layer_bits.search_bits(model, got, [], context) is got, "what is known is not searched for"


def test_search__of_what_is_not_finite_names_the_cause(vlm, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = vlm
    monkeypatch.setattr(calibrate_kv, "divergences", lambda _, candidates, *__: torch.full((len(candidates),), torch.nan))
    with pytest.raises(CalibrationError, match="divergence of next-token probabilities, which is not finite"):
        layer_bits.search_bits(model, KVSpec(2, by_layer=True), [batch], mmqc.kv.cache.prepare(model))


def test_quantize__by_layer_generates_and_is_saved(tmp_path) -> None:
    model, batch = tiny_qwen2_vl()
    with pytest.raises(CalibrationError, match="the layers' bits"):
        mmqc.quantize_(model, calibquant(4, by_layer=True, rounding="nearest"), progress=False)
    report = mmqc.quantize_(model, calibquant(3, by_layer=True), calibration=[batch], progress=False)
    spec = report.config.kv
    assert spec is not None
    assert sum(spec.layer_bits) <= 6
    assert len(spec.layer_bits) == 2
    assert sum(moment_of(m) is not None for m in model.modules()) == 2
    assert [layer.bits for layer in report.kv_scores] == list(spec.layer_bits)
    assert "visual KV cache in 3 bits on average" in report.summary()
    assert f"bits of the cache's layers: {spec.layer_bits[0]} {spec.layer_bits[1]}" in report.summary()
    want = model.generate(**batch, **GREEDY, return_dict_in_generate=True)
    words = [layer.segments[0].k_words.shape[2] for layer in want.past_key_values.packed]
    assert [w // spec.layer_bits[0] for w in words[:1]] == [w // spec.layer_bits[1] for w in words[1:]]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again.generate(**batch, **GREEDY), want.sequences)


def test_layer_bits__what_cannot_be(vlm) -> None:
    model, _ = vlm
    for field, values in (("bits", {"bits": 9, "by_layer": True}), ("layer_bits", {"bits": 2, "layer_bits": (1, 3)})):
        with pytest.raises(ConfigError, match=f"KVSpec.{field}"):
            KVSpec(**values)
    for spec, message in (
        (KVSpec(2, by_layer=True), "found: quantize_ the model"),
        (KVSpec(2, layer_bits=(1, 1, 1)), "3 numbers for a model of 2 layers"),
        (KVSpec(2, layer_bits=(4, 1)), "more than bits = 2 on average"),
    ):
        with pytest.raises(ConfigError, match=message):
            QuantizedCache(model, spec)


def test_of_layer__narrows_and_rounds_where_bits_are_few() -> None:
    spec = calibquant(3, by_layer=True, layer_bits=(1, 2, 4, 8)).kv
    assert spec is not None
    layers = [spec.of_layer(i) for i in range(4)]
    assert [(s.bits, s.shrink_keys, s.rounding) for s in layers] == [
        (1, 0.6, "queries"),
        (2, 1.0, "queries"),
        (4, 1.0, "nearest"),
        (8, 1.0, "nearest"),
    ]
    assert KVSpec(2, shrink_keys=0.5).of_layer(1) == KVSpec(2, shrink_keys=0.5)
