"""The sample as a whole through vLLM's own Qwen2-VL class and mmqc's loader, on the CPU, against our model (``make test-vllm``)."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_process import PYTHONS, needs_vllm, run

import mmqc
from mmqc import recipes

STATIC8 = recipes.rtn(8, activation_bits=8)
RECIPES = {  # and the least agreement of logits in decibels: where their float32 differs, codes of inputs round elsewhere
    "Hadamards": (recipes.rotate(), 80.0),
    "W8A8 static": (STATIC8, 30.0),
    "W8A8 by token": (STATIC8.with_token_scales(), 30.0),
    "W8A8-fp8": (STATIC8.with_float8(), 20.0),
    "W4A16": (recipes.rtn(4, group_size=128, head_bits=8), 80.0),
    "integer scales": (recipes.integer_scale(), 30.0),
    "mquant": (recipes.mquant(4, solver="rtn"), 30.0),
    "resq": (recipes.resq(4, kv_bits=None, solver="rtn"), 15.0),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By recipe: our model, and the directory it was saved to, and a damaged checkpoint."""
    sample, made = mmqc.samples.load("digits-vqa"), {}
    for name, (recipe, _) in RECIPES.items():
        model = copy.deepcopy(sample.model)
        mmqc.quantize_(model, recipe, sample.calibration(2), progress=False)
        folder = tmp_path_factory.mktemp("native")
        model.save_pretrained(folder)
        made[name] = model, folder
    model, whole = made["W8A8 static"]
    damaged = tmp_path_factory.mktemp("damaged")
    for file in whole.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    tensors = load_file(damaged / "model.safetensors")
    next(t for name, t in sorted(tensors.items()) if name.endswith("q_proj.qweight"))[3, 5] ^= 1
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    return {**made, "damaged": (model, damaged)}


@pytest.fixture(scope="module")
def prompts():
    """Two, of images and text."""
    sample = mmqc.samples.load("digits-vqa")
    batches = sample.prompts(2)
    assert all(batch["input_ids"].shape[0] == 1 for batch in batches)
    return sample.model, batches


@pytest.fixture(scope="module", params=PYTHONS or ["none"])
def answers(request, saved, prompts, tmp_path_factory):
    """By recipe: what one vLLM said."""
    where = tmp_path_factory.mktemp("answers")
    model, batches = prompts
    given = [
        {
            "ids": batch["input_ids"][0],
            "pixels": batch["pixel_values"],
            "grid": batch["image_grid_thw"],
            "positions": model.model.get_rope_index(**{k: v for k, v in batch.items() if k != "pixel_values"})[0][:, 0],
        }
        for batch in batches
    ]
    torch.save(given, where / "given.pt")
    folders = {name: str(folder) for name, (_, folder) in saved.items()}
    run(request.param, ["vllm_model.py", where / "store", where / "given.pt", where / "out.pt", *folders.values()])
    found = torch.load(where / "out.pt")
    return {name: found[folder] for name, folder in folders.items()}


@needs_vllm
@pytest.mark.parametrize("name", RECIPES)
def test_logits__through_the_engines_class_are_those_of_our_model(name, answers, saved, prompts):
    for batch, logits in zip(prompts[1], answers[name], strict=True):
        with torch.no_grad():
            want = saved[name][0](**batch).logits[0]
        noise = (logits - want).double().square().sum()
        assert 10 * torch.log10(want.double().square().sum() / noise) > RECIPES[name][1]
        assert torch.equal(logits[-1].argmax(), want[-1].argmax())


@needs_vllm
def test_tensor__that_is_not_as_it_was_saved_is_named(answers):
    assert "q_proj.qweight differs from what was saved" in answers["damaged"]
