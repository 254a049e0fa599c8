"""Compiling ahead: a call of each kind, and nothing that is left to compile for others of these kinds."""

import random
from typing import Any

import pytest
import torch
from models import IMAGE, tiny_qwen2_vl
from prompts import batch_of, drawn
from transformers import GenerationConfig

import mmqc
from mmqc.compiler import warm as warming
from mmqc.compiler.record import collect_records

pytestmark = pytest.mark.usefixtures("without_inductor")
PROMPTS = [batch_of((1, 4, 6), (1, 2, 4)), batch_of((1, 4, 4)), batch_of((1, 6, 4))]


@pytest.mark.slow
def test_warm__nothing_is_left_to_compile() -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    with collect_records() as records:
        calls = mmqc.warm(model, PROMPTS, progress=False)
        kinds = ["several images or tiles", "1 image", "text alone"]
        batches = [f"2 prompts{lengths}, {k}" for k in kinds for lengths in ("", " of unlike lengths")]
        assert [c.kind for c in calls] == [f"1 prompt, {k}" for k in kinds] + batches
        assert all(c.first_seconds > 0 and c.again_seconds > 0 for c in calls)
        done, draw = len(records), random.Random(3)
        more: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": "static"}
        for batch in (
            batch_of((1, 8, 6)),
            drawn(draw, 1),
            drawn(draw, 4),
            drawn(draw, 2),
            {"input_ids": torch.randint(10, 20, (3, 9))},
        ):
            model.generate(**batch, **more, custom_generate=mmqc.compiled_loop)
        assert len(records) == done > 0


@pytest.mark.slow
def test_warm__goes_on_behind_an_end_of_sequence() -> None:
    """Whatever token comes first, a step is compiled."""
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    ends = list(range(40))
    config = GenerationConfig(do_sample=False, cache_implementation="static", eos_token_id=ends, pad_token_id=0, max_length=9)
    model.generation_config.eos_token_id = ends  # which stands in where a config says none
    with collect_records() as records:
        mmqc.warm(model, PROMPTS[1], config, batches=(1,), progress=False)
    assert len(records) == 4, "a prompt and a step, with an image and without"
    assert config.eos_token_id == ends


def test_warm__text_is_what_stands_behind_the_images() -> None:
    model, _ = tiny_qwen2_vl(depth=1)
    ids = torch.tensor([[5, IMAGE, IMAGE, 6, 7, 8]])
    text = warming._text_of(model, {"input_ids": ids})
    assert text is not None
    assert text["input_ids"].tolist()[0][-3:] == [6, 7, 8]
    assert IMAGE not in text["input_ids"]
    assert warming._text_of(model, {"input_ids": ids[:, :4]}) is None


def test_warm__says_what_is_wrong_with_the_prompts() -> None:
    model, _ = tiny_qwen2_vl(depth=1)
    with pytest.raises(ValueError, match="prompts is empty"):
        mmqc.warm(model, [])
    with pytest.raises(ValueError, match="has 2 sequences"):
        mmqc.warm(model, [drawn(random.Random(1), 2)])


@pytest.mark.parametrize(
    ("features", "kind"),
    [
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "1 image"),
        ({"pixel_values": torch.zeros(1, 4, 3, 8, 8)}, "several images or tiles"),
        ({"pixel_values": torch.zeros(1, 1, 3, 8, 8)}, "1 image"),
        ({"pixel_values": torch.zeros(16, 12), "image_grid_thw": torch.ones(1, 3)}, "1 image"),
        ({"pixel_values_videos": torch.zeros(16, 12)}, "video"),
        ({}, "text alone"),
    ],
)
def test_warm__kinds_by_what_comes_with_the_tokens(features: dict[str, Any], kind: str) -> None:
    assert warming._images({"input_ids": torch.zeros(1, 4, dtype=torch.long), **features}) == kind
