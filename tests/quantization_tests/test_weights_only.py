"""Weights alone, without data: every linear module, rounded where it is told to be."""

import pytest
import torch
import transformers
from models import tiny_qwen2_vl
from small_vlm import Small, check_unchanged, traces
from torch import nn

import mmqc
from mmqc import recipes
from mmqc.calibration.calibrate import CalibrationError
from mmqc.config import Scheme
from mmqc.nn.linear import QuantLinear


def test_weights_only__every_linear_without_calibration() -> None:
    model = Small()
    report = mmqc.quantize_(model, recipes.rtn(8), progress=False)
    kinds = {n: type(m) for n, m in model.named_modules() if isinstance(m, nn.Linear | QuantLinear)}
    assert len(report.layers) == len(kinds)  # no get_output_embeddings: the head is a linear like the others
    assert set(kinds.values()) == {QuantLinear}
    assert all(m.input_scale is None for m in model.modules() if isinstance(m, QuantLinear))


def test_weights_only__keeps_the_head_of_transformers_models() -> None:
    model, _ = tiny_qwen2_vl()
    report = mmqc.quantize_(model, recipes.rtn(4, group_size=8), progress=False)
    assert [r.fqn for r in report.refused] == ["lm_head"]
    assert type(model.lm_head) is nn.Linear
    assert len(report.layers) == 24


def test_weights_only__on_a_device_of_its_own() -> None:
    model, other = Small(), Small()
    mmqc.quantize_(model, recipes.rtn(4, group_size=8), progress=False)
    mmqc.quantize_(other, recipes.rtn(4, group_size=8), progress=False, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


FOUR = recipes.rtn(4, group_size=8)


@pytest.mark.parametrize("vision", [recipes.rtn(8).vision, None], ids=["other bits", "in floating point"])
def test_weights_only__towers_of_different_schemes_need_a_batch(vision: Scheme | None) -> None:
    model = Small()
    before = traces(model)
    with pytest.raises(CalibrationError, match=r"different schemes, or one is to stay in floating point.*calibration=\[batch\]"):
        mmqc.quantize_(model, FOUR.replace(vision=vision), progress=False)
    check_unchanged(model, before)


def test_weights_only__a_batch_tells_which_tower_stays_in_floating_point() -> None:
    model, inputs = tiny_qwen2_vl()
    config = FOUR.replace(vision=None, projector=None)
    with pytest.raises(CalibrationError, match="one is to stay in floating point"):
        mmqc.quantize_(model, config, progress=False)
    report = mmqc.quantize_(model, config, [inputs], progress=False)
    assert {layer.tower for layer in report.layers} == {"language"}


def test_weights_only__a_model_of_text_alone_has_one_tower() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    report = mmqc.quantize_(model, FOUR.replace(vision=None, projector=None), progress=False)
    assert len(report.layers) == 7


def test_weights_only__a_failure_on_the_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmqc.quantization import weights_only

    real, left = weights_only.quantized_linear, [3]

    def third_fails(*args: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(weights_only, "quantized_linear", third_fails)
    model = Small()
    before = traces(model)
    with pytest.raises(KeyboardInterrupt):
        mmqc.quantize_(model, recipes.rtn(8), progress=False)
    check_unchanged(model, before)
