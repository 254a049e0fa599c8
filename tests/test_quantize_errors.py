"""Whatever goes wrong in ``quantize_``: a clear message, and the model as it was."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import IMAGE
from models import text_with_images, tiny_qwen2_vl
from small_vlm import Small, batches, check_unchanged, quantize, traces

import mmqc
from mmqc import ConfigError, recipes
from mmqc.calibration.calibrate import CalibrationError
from mmqc.config import QuantConfig
from mmqc.graph.record import RecordError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("some/model", "model is a str, not a torch.nn.Module: pass a model that is loaded"),
        (Small, "model is the class Small, "),
        (SimpleNamespace(model=torch.nn.Linear(2, 2)), "model is a SimpleNamespace, .* pass its .model"),
    ],
)
def test_quantize__of_no_module(given: Any, message: str) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda model: mmqc.quantize_(model, recipes.rtn(8)),
        lambda model: mmqc.plan(model, recipes.rtn(8), {}),
        lambda model: mmqc.explain(model, {}),
        lambda model: mmqc.export(model, {}, "model.pt2"),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=message):
            call(given)


@pytest.mark.parametrize(
    ("config", "calibration", "error", "message"),
    [
        (recipes.rtn(8, 8), [], CalibrationError, "calibration is empty, but this config needs data"),
        (recipes.rotate(), [], CalibrationError, "rewrites need one batch"),
        (recipes.mquant(8), "text", CalibrationError, "no calibration batch has an image"),
        (recipes.rtn(8, 8), "nan", CalibrationError, "calibration batch 1: pixel_values holds NaN"),
        (recipes.rtn(8, 8).replace(keep=("nothing",)), None, ConfigError, "keep pattern 'nothing' matches no linear"),
        ("mquant", None, ConfigError, "config is a str; pass a mmqc.QuantConfig"),
        ({"language": None}, None, ConfigError, "config is a dict"),
    ],
)
def test_quantize__errors(config: Any, calibration: Any, error: type[Exception], message: str) -> None:
    model = Small().train()
    given = batches()
    if calibration == "text":
        given = [{**b, "input_ids": b["input_ids"].clamp(max=IMAGE - 1)} for b in given]
    elif calibration == "nan":
        given[1] = {**given[1], "pixel_values": given[1]["pixel_values"] * torch.nan}
    elif calibration is not None:
        given = calibration
    before = traces(model)
    with pytest.raises(error, match=message):
        mmqc.quantize_(model, config, given, progress=False)
    check_unchanged(model, before)


def test_quantize__none_is_no_calibration() -> None:
    model = Small()
    with pytest.raises(CalibrationError, match="calibration is None"):
        mmqc.quantize_(model, recipes.rtn(8, 8), progress=False)


def test_quantize__unknown_keep_pattern_without_calibration() -> None:
    model = Small()
    before = traces(model)
    with pytest.raises(ConfigError, match="keep pattern 'nothing' matches no linear"):
        mmqc.quantize_(model, recipes.rtn(8).replace(keep=("nothing",)), progress=False)
    check_unchanged(model, before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_quantize__bad_weight(value: float) -> None:
    model = Small()
    with torch.no_grad():
        model.model.merger.mlp.up.weight[3, 4] = value
    before = traces(model)
    with pytest.raises(ValueError, match=r"model.merger.mlp.up.weight holds NaN or infinite values"):
        quantize(model, recipes.rtn(8, 8))
    check_unchanged(model, before)


def test_quantize__quantized_already() -> None:
    model = Small()
    quantize(model, recipes.rtn(8, 8))
    before = traces(model)
    with pytest.raises(ValueError, match="quantized already"):
        quantize(model, recipes.rtn(8, 8))
    check_unchanged(model, before)


@pytest.mark.parametrize("config", [recipes.rtn(8, 8), recipes.mquant(4), recipes.rotate()])
def test_quantize__failing_batch_rolls_everything_back(config: QuantConfig) -> None:
    model = Small()
    given = batches()
    given[2] = {**given[2], "input_ids": given[2]["input_ids"].clone()}
    given[2]["input_ids"][0, 0] = IMAGE - 2
    model.fail_on = IMAGE - 2
    clean = [{**b, "input_ids": b["input_ids"].where(b["input_ids"] != IMAGE - 2, 1)} for b in given[:2]]
    before = traces(model)
    if config == recipes.rotate():  # reads its first batch only
        clean = clean[:0]
    with pytest.raises(RuntimeError, match="this batch is broken"):
        quantize(model, config, [*clean, given[2]])
    check_unchanged(model, before)


def test_quantize__failing_solver_rolls_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmqc.passes import quantize_weights

    calls = []
    solve = quantize_weights.solve

    def third_fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return solve(*args, **kwargs)

    monkeypatch.setattr(quantize_weights, "solve", third_fails)
    model = Small()
    before = traces(model)
    with pytest.raises(KeyboardInterrupt):
        quantize(model, recipes.mquant(8, solver="rtn"))
    check_unchanged(model, before)


def test_quantize__tensor_from_nowhere_names_the_module() -> None:
    model = Small()
    hidden = [torch.ones(16)]
    model.model.merger.mlp.up.register_forward_hook(lambda m, a, y: y * hidden[0][0] + torch.from_numpy(y.numpy() * 0))
    before = traces(model)
    with pytest.raises(RecordError, match="from nowhere"):
        quantize(model, recipes.rtn(8, 8))
    check_unchanged(model, before)


def test_quantize__text_batch_of_the_real_model() -> None:
    model, _ = tiny_qwen2_vl()
    text = {k: v for k, v in text_with_images([]).items()}
    with pytest.raises(CalibrationError, match="no calibration batch has an image"):
        mmqc.quantize_(model, recipes.mquant(8), [text], progress=False)
    report = mmqc.quantize_(model, recipes.mquant(8, solver="rtn", msq=False, rotate=False), [text], progress=False)
    assert {layer.tower for layer in report.layers} == {"language"}
