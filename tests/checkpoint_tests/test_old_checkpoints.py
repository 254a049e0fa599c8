"""Checkpoints written at commit c4cbf3c load as they did then.

Each is the tiny Qwen2-VL of tests/support/models.py after ``quantize_`` with one recipe, as ``save_pretrained`` wrote it.
``batch.safetensors`` is the input and ``logits.safetensors`` what the code of that commit answered in float64: in float32 an
activation near a rounding boundary gets another code on another CPU.
"""

from pathlib import Path

import pytest
import torch
from float64 import output_of, to_float64
from safetensors.torch import load_file
from tolerance import assert_close
from torch import nn
from transformers import AutoModelForImageTextToText

from mmqc.nn.linear import QuantLinear
from mmqc.nn.mixed_linear import MixedLinear

FOLDER = Path(__file__).resolve().parents[1] / "fixtures/checkpoints_c4cbf3c"
KIND = {"mquant4": QuantLinear, "awq": QuantLinear, "resq": MixedLinear, "intscale": QuantLinear}


def in_model(name: str) -> str:
    """Of a tensor in a file: transformers writes Qwen2-VL under the names that it had before its towers got a parent."""
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


@pytest.fixture(params=KIND)
def old(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    """A recipe, and its checkpoint loaded by the code of today."""
    return request.param, AutoModelForImageTextToText.from_pretrained(FOLDER / request.param)


def test_old_checkpoint__every_tensor_is_the_files(old: tuple[str, nn.Module]) -> None:
    recipe, model = old
    stored = {in_model(name): t for name, t in load_file(FOLDER / recipe / "model.safetensors").items()}
    loaded = model.state_dict()
    assert any(isinstance(m, KIND[recipe]) for m in model.modules())
    # A tied head is in the file once, as the embedding.
    assert loaded.keys() - stored.keys() <= {"lm_head.weight"}
    for name, tensor in stored.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name


def test_old_checkpoint__logits_of_then(old: tuple[str, nn.Module]) -> None:
    recipe, model = old
    model, batch = to_float64(model, load_file(FOLDER / "batch.safetensors"))
    assert_close(output_of(model, {**batch, "use_cache": False}), load_file(FOLDER / "logits.safetensors")[recipe])
