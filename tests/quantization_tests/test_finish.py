"""What stays on a quantized model: its config and record, hooks only where something needs them."""

import pytest
from models import tiny_qwen2_vl
from small_vlm import Small, batches, quantize

import mmqc
from mmqc.config import KVSpec, QuantConfig
from mmqc.nn.modality import attached
from mmqc.quantization.convert import size_of
from mmqc.recipes import calibquant, mquant, rotate, rtn


@pytest.mark.parametrize(("config", "stays"), [(rtn(8, 8), False), (rotate(), False), (mquant(8, solver="rtn"), True)])
def test_finish__visual_tokens_are_looked_for_only_where_a_linear_asks(config: QuantConfig, stays: bool) -> None:
    model = Small()
    before = size_of(model)
    report = quantize(model, config, batches())
    assert (attached(model) is not None) == stays
    assert (report.size_before, report.size_after) == (before, size_of(model))
    assert report.seconds > sum(layer.seconds for layer in report.layers)


def test_finish__the_record_is_kept_for_explain() -> None:
    model, batch = tiny_qwen2_vl()
    report = mmqc.quantize_(model, rtn(8, 8), [batch], progress=False)
    record = model.config.quantization_config.record
    assert [p["name"] for p in record["passes"]] == [p.name for p in report.passes]
    assert record["unseen"] == record["untied"] == []
    assert model.config.quantization_config.quant_config == report.config
    twin, _ = tiny_qwen2_vl()
    mmqc.quantize_(twin, rtn(8), progress=False)
    assert twin.config.quantization_config.record == {"passes": [], "untied": []}


def test_finish__the_config_of_a_quantized_model_gets_the_cache_and_keeps_its_record() -> None:
    model, batch = tiny_qwen2_vl()
    mmqc.quantize_(model, rtn(8, 8), [batch], progress=False)
    saved = model.config.quantization_config
    record, modules = saved.record, saved.modules
    report = mmqc.quantize_(model, calibquant(2, search="none"), progress=False)
    assert model.config.quantization_config is saved
    assert saved.record is record
    assert saved.modules is modules
    assert saved.quant_config.kv == report.config.kv == KVSpec(2, search="none")
    assert (report.layers, report.size_before, report.size_after) == ([], 0, 0)
