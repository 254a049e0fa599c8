"""Calibration batches that the model continued itself."""

import copy
from typing import Any

import pytest
import torch
from models import IMAGE, text_with_images, tiny_qwen2_vl

import mmqc
from mmqc import recipes
from mmqc.calibration.calibrate import CalibrationError
from mmqc.calibration.generated import with_generated


def test_generate_tokens__text_is_appended() -> None:
    model, batch = tiny_qwen2_vl()
    grown = with_generated(model, batch, 5, (IMAGE,))
    length = batch["input_ids"].shape[1]
    expected = model.generate(**batch, max_new_tokens=5, do_sample=False)
    assert torch.equal(grown["input_ids"], expected)
    assert grown["attention_mask"][:, length:].eq(1).all()
    assert grown["mm_token_type_ids"][:, length:].eq(0).all()
    assert grown["pixel_values"] is batch["pixel_values"]
    padded = {**text_with_images([4]), "attention_mask": torch.zeros(1, 18, dtype=torch.long)}
    with pytest.raises(CalibrationError, match="padded on the left"):
        with_generated(model, padded, 5)
    with pytest.raises(CalibrationError, match="position_ids"):
        with_generated(model, {**batch, "position_ids": batch["input_ids"]}, 5)


def test_generate_tokens__a_batch_stays_as_it_is_where_generate_writes_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_qwen2_vl()
    before, generate = batch["input_ids"].clone(), model.generate

    def overwriting(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:  # as BLIP's
        input_ids[:, 0] = 1
        return generate(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "generate", overwriting)
    grown = with_generated(model, batch, 5, (IMAGE,))
    assert torch.equal(batch["input_ids"], before)
    assert torch.equal(grown["input_ids"][:, : before.shape[1]], before)


def test_generate_tokens__reach_the_calibration() -> None:
    model, batch = tiny_qwen2_vl(tied=False)
    other = copy.deepcopy(model)
    more = mmqc.quantize_(model, recipes.rtn(8, 8), [batch], progress=False, generate_tokens=24)
    less = mmqc.quantize_(other, recipes.rtn(8, 8), [batch], progress=False)
    ranges = [{x.fqn: x.ranges["text"] for x in r.layers if x.tower == "language"} for r in (more, less)]
    slack = 1 - 2**-12  # a longer batch is summed in another order
    assert all(ranges[0][n][0] <= low * slack and high * slack <= ranges[0][n][1] for n, (low, high) in ranges[1].items())
    assert any(ranges[0][n][0] * slack < low or ranges[0][n][1] * slack > high for n, (low, high) in ranges[1].items())
