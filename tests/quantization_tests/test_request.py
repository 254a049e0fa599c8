"""The arguments of ``quantize_``: read once, and refused before a forward has run."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from small_vlm import Small, batches, request
from torch import nn
from transformers import BatchEncoding

import mmqc
from mmqc import ConfigError, recipes
from mmqc.calibration.calibrate import CalibrationError, RowWeights
from mmqc.config import QuantConfig, WeightSpec
from mmqc.quantization.request import Request


def read(config: Any, calibration: Any = None, model: Any = None, **more: Any) -> Request:
    return request(Small() if model is None else model, config, calibration, **more)


def test_read__iterates_the_batches_once_and_keeps_them() -> None:
    given = batches()
    found = read(recipes.rtn(8, 8), iter(given))
    assert found.batches is not None
    assert [dict(b) for b in found.batches] == given
    assert all(a is not b for a, b in zip(found.batches, given, strict=True)), "a caller may change its own dicts"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.config = recipes.rtn(4)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config", "calibrated", "changes", "records"),
    [
        (recipes.rtn(8), False, True, False),
        (recipes.rtn(8), True, True, True),
        (QuantConfig(), True, True, True),
        (recipes.rotate() | recipes.calibquant(2), True, True, True),
        (recipes.rtn(8) | recipes.calibquant(2, search="none"), False, True, False),
        (recipes.calibquant(2), True, False, False),
        (recipes.calibquant(2, search="none"), False, False, False),
    ],
)
def test_read__says_which_phases_there_are(config: QuantConfig, calibrated: bool, changes: bool, records: bool) -> None:
    model, batch = tiny_qwen2_vl()
    found = read(config, [batch] if calibrated else None, model)
    assert (found.changes_weights, found.records) == (changes, records)
    assert found.kv == config.kv
    assert found.config == config.replace(kv=None)


def test_read__weights_of_rows_are_one_where_none_are_given() -> None:
    weights = read(recipes.rtn(8), modality_weights={"visual": 2.0}).row_weights
    assert weights.few_bits == weights.others == {"text": 1.0, "visual": 2.0, "mixed": 1.0}


def test_read__weights_that_balance_are_gptqs_in_2_bits_alone_unless_they_are_asked_for() -> None:
    model, batch = tiny_qwen2_vl()
    visual = int((batch["input_ids"] == model.config.image_token_id).sum())
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][0, 5:] = model.config.image_token_id
    visual = int((batch["input_ids"] == model.config.image_token_id).sum())
    even = {"text": 2.0 ** round(math.log2(visual / (batch["input_ids"].numel() - visual))), "visual": 1.0, "mixed": 1.0}
    equal = {"text": 1.0, "visual": 1.0, "mixed": 1.0}
    assert even["text"] > 1
    for given, expected in (("auto", (even, equal)), ("balanced", (even, even)), (None, (equal, equal))):
        weights = read(recipes.gptq(2, 32), [batch], model, modality_weights=given).row_weights
        assert (weights.few_bits, weights.others) == expected
        kinds = [(2, "gptq"), (3, "gptq"), (2, "awq_clip")]
        assert [weights.of(WeightSpec(bits, solver=solver)) for bits, solver in kinds] == [expected[0], expected[1], expected[1]]


def test_read__weights_are_one_where_there_is_nothing_to_balance() -> None:
    model, batch = tiny_qwen2_vl()
    text = {"input_ids": torch.ones_like(batch["input_ids"])}
    assert read(recipes.gptq(2, 32), [text], model, modality_weights="auto").row_weights == RowWeights()
    assert read(recipes.gptq(4, 32), [batch], model, modality_weights="auto").row_weights == RowWeights()
    with pytest.raises(CalibrationError, match="modality_weights='balanced': no batch of calibration has a visual token"):
        read(recipes.rtn(8), [text], model, modality_weights="balanced")


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (
            recipes.rtn(8),
            {"inputs": "rounded"},
            r"inputs = 'rounded' is not supported; allowed: \('float', 'quantized', 'asymmetric'\)",
        ),
        (recipes.rtn(8), {"generate_tokens": -1}, "generate_tokens = -1"),
        (recipes.rtn(8), {"modality_weights": {"audio": 1.0}}, "'audio' is no modality"),
        (recipes.rtn(8), {"modality_weights": {"text": 0.0}}, "its weight is not positive"),
        (recipes.rtn(8), {"modality_weights": "even"}, "'auto', 'balanced', or a dict"),
        (recipes.calibquant(4), {}, "is no transformers model"),
    ],
)
def test_read__refuses_wrong_arguments(config: QuantConfig, more: dict[str, Any], message: str) -> None:
    class Unused(Small):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("a forward ran")

    with pytest.raises(ConfigError, match=message):
        read(config, None, Unused(), **more)


def test_read__asymmetric_inputs_take_batches_whatever_the_solver() -> None:
    model, batch = tiny_qwen2_vl()
    assert read(recipes.rtn(8), [batch], model, inputs="asymmetric").records
    for none in (None, []):
        with pytest.raises(CalibrationError, match="this config needs data"):
            read(recipes.rtn(8), none, model, inputs="asymmetric")


def test_read__only_a_cache_is_packed_on_a_quantized_model() -> None:
    model, batch = tiny_qwen2_vl()
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    assert read(recipes.calibquant(4), [batch], model).changes_weights is False
    with pytest.raises(ValueError, match="quantized already"):
        read(recipes.rtn(8) | recipes.calibquant(4), [batch], model)


def test_read__the_cache_is_asked_for_batches_first() -> None:
    model: nn.Module = tiny_qwen2_vl()[0]
    with pytest.raises(CalibrationError, match="searches for tau"):
        read(recipes.mquant(8) | recipes.calibquant(1), [], model)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (torch.zeros(2, 96, dtype=torch.long), "calibration is of type Tensor; it must"),
        ("data.jsonl", "calibration is of type str"),
        (3, "calibration is of type int"),
        ({"input_ids": torch.zeros(1, 3, dtype=torch.long)}, "calibration is of type dict"),
        ([torch.zeros(2, 96, dtype=torch.long)], "calibration batch 0 is of type Tensor"),
        (["text"], "calibration batch 0 is of type str"),
        ([None], "calibration batch 0 is of type NoneType"),
        ([7], "calibration batch 0 is of type int"),
        ([*batches(2), [1, 2]], "calibration batch 2 is of type list"),
        ([{0: torch.zeros(1)}], r"calibration batch 0 is of type dict, with the keys \[0\]"),
    ],
)
def test_read__what_is_no_keyword_batch_is_named(given: Any, what: str) -> None:
    with pytest.raises(CalibrationError, match=f"{what}.*keyword batches for the model's forward"):
        read(recipes.rtn(8, 8), given)


def test_read__takes_what_processors_return() -> None:
    found = read(recipes.rtn(8, 8), [BatchEncoding(batches()[0])])
    assert found.batches is not None
    assert found.batches[0].keys() == batches()[0].keys()


@pytest.mark.parametrize("data", [None, batches()], ids=["without data", "calibrated"])
def test_read__a_model_without_values_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="is on the meta device, without values: load the model's weights"):
        read(recipes.rtn(8), data, Small().to("meta"))
