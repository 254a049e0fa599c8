"""calibquant in configs, recipes and quantize_: composition, the search for tau, save and load, errors."""

import copy
import json
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from tolerance import assert_close
from torch import Tensor

import mmqc
from mmqc import ConfigError, KVSpec, QuantConfig, QuantizedCache
from mmqc.calibration.calibrate import CalibrationError
from mmqc.config import KVRounding
from mmqc.kv import calibrate as calibrate_kv
from mmqc.kv.query_moment import moment_of
from mmqc.recipes import calibquant, kivi, rotate, rtn

GREEDY = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture
def vlm() -> tuple[Any, dict[str, Tensor]]:
    return tiny_qwen2_vl()


def cache_of(model: Any, batch: dict[str, Tensor]) -> Any:
    return model.generate(**batch, **GREEDY, return_dict_in_generate=True).past_key_values


def test_config__composes_and_survives_json() -> None:
    config = rtn(8) | calibquant(2, tau=((0, 1), (2, 3)))
    assert config == calibquant(2, tau=((0, 1), (2, 3))) | rtn(8)
    assert config.replace(kv=None) == rtn(8)
    assert QuantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.kv is not None
    assert [config.kv.tau_of(i) for i in range(2)] == [(0.0, 1.0), (2.0, 3.0)]
    assert kivi(2).kv == KVSpec(2, "channel", "token")
    assert calibquant(1).needs_calibration
    assert not (rtn(8) | calibquant(4)).needs_calibration
    for wrong in (lambda: calibquant(1) | kivi(2), lambda: rtn(8) | rtn(4)):
        with pytest.raises(ConfigError, match="nothing but kv"):
            wrong()
    for field, value in (("bits", 3), ("values", "head"), ("shrink_keys", 0.0), ("search", "grid"), ("tau", ((1, -1),))):
        with pytest.raises(ConfigError, match=f"KVSpec.{field}"):
            KVSpec(**{field: value})


def test_quantize__generate_packs_and_a_saved_model_does_too(vlm, tmp_path) -> None:
    model, batch = vlm
    plain = model.generate(**batch, **GREEDY)
    report = mmqc.quantize_(model, rtn(8) | calibquant(1), calibration=[batch], progress=False)
    assert report.layers, "the weights are quantized too"
    assert report.config.kv is not None
    assert len(report.config.kv.tau) == 1
    cache = cache_of(model, batch)
    assert isinstance(cache, QuantizedCache)
    assert cache.packed[0].tau == report.config.kv.tau[0]
    got = model.generate(**batch, **GREEDY)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again.generate(**batch, **GREEDY), got)
    assert isinstance(cache_of(again, batch), QuantizedCache)
    twin = copy.deepcopy(model)
    assert cache_of(twin, batch).shared.context is not cache.shared.context
    static = model.generate(**batch, **GREEDY, cache_implementation="static", disable_compile=True)
    assert static.shape == plain.shape, "a cache that the caller asks for is the caller's"


def test_quantize__kv_alone_leaves_weights_and_other_caches(vlm) -> None:
    model, batch = vlm
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        logits = model(**batch).logits
    mmqc.quantize_(model, calibquant(8), progress=False)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        assert_close(model(**batch).logits, logits)
    assert cache_of(model, batch).sizes()["visual"] > 0


def test_quantize__refuses_before_it_changes_anything(vlm) -> None:
    model, batch = vlm
    text = {"input_ids": batch["input_ids"][:, :7], "attention_mask": batch["attention_mask"][:, :7]}
    attention = model.model.language_model.config._attn_implementation
    for config, calibration, error, message in (
        (calibquant(1), None, CalibrationError, "searches for tau"),
        (calibquant(1), [text], CalibrationError, "no calibration batch has visual tokens"),
        (rtn(8) | calibquant(2, tau=((0, 0),) * 5), [batch], ConfigError, "5 pairs for a model of 2 layers"),
    ):
        with pytest.raises(error, match=message):
            mmqc.quantize_(model, config, calibration=calibration, progress=False)
        assert not any(type(m).__module__.startswith("mmqc") for m in model.modules())
        assert model.model.language_model.config._attn_implementation == attention
        assert type(cache_of(model, batch)).__name__ == "DynamicCache"
    with pytest.raises(ConfigError, match="kv_rounding"):
        QuantConfig(kv=KVSpec(1), kv_rounding=KVRounding())
    with pytest.raises(ConfigError, match="no transformers model"):
        mmqc.quantize_(torch.nn.Linear(2, 2), calibquant(4), progress=False)


@pytest.mark.parametrize("weights", [rtn(8), rotate()], ids=["quantized", "rewritten"])
def test_quantize__a_search_that_fails_leaves_the_model_as_it_was(vlm, monkeypatch, weights: QuantConfig) -> None:
    model, batch = vlm
    before = {name: t.clone() for name, t in model.state_dict().items()}
    modules, training = [type(m) for m in model.modules()], model.model.visual.train()
    attention = model.model.language_model.config._attn_implementation
    plain = model.generate(**batch, **GREEDY)

    def fail(*args: Any) -> Any:
        seen.append([type(m) for m in model.modules()] != modules or not torch.equal(next(model.parameters()), first))
        raise KeyboardInterrupt("on the way")

    seen, first = [], next(model.parameters()).clone()
    monkeypatch.setattr(calibrate_kv, "divergences", fail)
    with pytest.raises(KeyboardInterrupt, match="on the way"):
        mmqc.quantize_(model, weights | calibquant(1), calibration=[batch], progress=False)
    assert seen == [True], "the search sees the changed model"
    assert [type(m) for m in model.modules()] == modules
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert model.model.language_model.config._attn_implementation == attention
    assert not hasattr(model.config, "quantization_config")
    assert training.training
    assert type(cache_of(model, batch)).__name__ == "DynamicCache"
    assert torch.equal(model.generate(**batch, **GREEDY), plain)


def test_rounding__is_saved_and_what_it_needs_is_said(vlm, tmp_path) -> None:
    model, batch = vlm
    with pytest.raises(ValueError, match="calibration saw, but this model has seen none"):
        model.generate(**batch, **GREEDY, past_key_values=QuantizedCache(model, KVSpec(1, rounding="queries")))
    with pytest.raises(CalibrationError, match="rounds keys by queries"):
        mmqc.quantize_(model, calibquant(1, tau=((0, 0),), rounding="queries"), progress=False)
    with pytest.raises(ConfigError, match=r"KVSpec.keys.*rounding"):
        KVSpec(1, "tensor", rounding="queries")
    text = {"text_bits": 8, "text_window": 2, "text_block": 8}
    config = rtn(8) | QuantConfig(kv=KVSpec(1, rounding="queries", search="model", **text))
    report = mmqc.quantize_(model, config, [batch], progress=False)
    notes = [str(r) for r in report.refused]
    assert any("kv_round_keys" in n for n in notes)
    assert any("kv_token_attention" in n for n in notes)
    got = model.generate(**batch, **GREEDY)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again.generate(**batch, **GREEDY), got)
    pairs = zip(map(moment_of, again.modules()), map(moment_of, model.modules()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None)
    mmqc.quantize_(twin := tiny_qwen2_vl()[0], calibquant(4), progress=False)
    assert all(moment_of(m) is None for m in twin.modules())


def test_rounding__a_failure_leaves_the_moments_that_were_there(vlm, monkeypatch) -> None:
    model, batch = vlm
    mmqc.quantize_(model, calibquant(1, search="none", rounding="queries"), [batch], progress=False)
    before = [m for m in map(moment_of, model.modules()) if m is not None]

    def fail(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate_kv, "divergences", fail)
    with pytest.raises(KeyboardInterrupt):
        mmqc.quantize_(model, calibquant(1), [batch], progress=False)
    after = [m for m in map(moment_of, model.modules()) if m is not None]
    assert len(before) == len(after) == 2
    assert all(a is b for a, b in zip(after, before, strict=True))
