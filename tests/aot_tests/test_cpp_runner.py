"""The C++ program answers questions about images with the same tokens as the model."""

import math
import subprocess
from pathlib import Path

import pytest
import torch
from cpp_program import build, saved
from torch import Tensor, nn

import mmqc
from mmqc import samples
from mmqc.aot.programs import described
from mmqc.aot.weights import Weights
from mmqc.lowering.package import compile_program, names_of_weights, write_package
from mmqc.samples.processor import END
from mmqc.samples.sample import Sample

QUESTIONS = 20


def ask(runner: Path, package: Path, file: Path, longest: int, stop: int, weights: Path | None = None) -> list[int]:
    """The tokens of the program's answer."""
    command = [str(runner), str(package), str(file), str(longest), str(stop), *([str(weights)] if weights else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(t) for t in done.stdout.split()]


def answers(runner: Path, package: Path, model: nn.Module, sample: Sample) -> list[tuple[list[int], list[int]]]:
    """Tokens of the program and of the model."""
    found = []
    for number, question in enumerate(sample.questions(QUESTIONS)):
        batch = sample.processor(question.prompt, question.images)
        longest = len(question.answer) + 1
        file = saved(batch, package.parent / f"{number}.safetensors")
        expected = model.generate(**batch, max_new_tokens=longest, do_sample=False)[0, batch["input_ids"].shape[1] :]
        found.append((ask(runner, package, file, longest, END), expected.tolist()))
    return found


# --- the program alone: a model of a few numbers ------------------------------------------------------------------------

WIDTH, VOCABULARY = 4, 23


class ToyVision(nn.Module):
    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"image_features": pixel_values.cos()}


class ToyPrefill(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, image_features: Tensor, key_0: Tensor, value_0: Tensor
    ) -> dict[str, Tensor]:
        h = (self.table[input_ids] + image_features.sum(0)) * attention_mask[..., None]
        key_0[:, :, : input_ids.shape[1]] = h[:, None]
        value_0[:, :, : input_ids.shape[1]] = h[:, None].sin()
        return {"logits": h.sum(1) @ self.table.T}


class ToyDecode(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, cache_position: Tensor, key_0: Tensor, value_0: Tensor
    ) -> dict[str, Tensor]:
        h = self.table[input_ids]
        key_0.index_copy_(2, cache_position, h[:, None])
        value_0.index_copy_(2, cache_position, h[:, None].sin())
        scores = (h[:, None] @ key_0.mT) / math.sqrt(WIDTH) + cache_position
        p = scores.masked_fill(attention_mask[:, None, None] == 0, -torch.inf).softmax(-1)
        return {"logits": (p @ value_0)[:, 0, 0] @ self.table.T}


def toy(folder: Path, weights: Path | None = None) -> tuple[dict[str, nn.Module], Path]:
    """A package of the three, with room for a cache of any size."""
    table = torch.randn(VOCABULARY, WIDTH)
    programs = {"vision": ToyVision(), "prefill": ToyPrefill(table), "decode": ToyDecode(table)}
    length, room, any_size = 5, 9, torch.export.Dim.DYNAMIC
    ids, cache = torch.arange(length)[None], torch.zeros(1, 1, room, WIDTH)
    tensors = {"image_features": torch.ones(3, WIDTH), "key_0": cache, "value_0": cache.clone()}
    example = {
        "vision": {"pixel_values": torch.ones(3, WIDTH)},
        "prefill": {"input_ids": ids, "attention_mask": torch.ones_like(ids), **tensors},
        "decode": {
            "input_ids": torch.ones(1, 1, dtype=torch.int64),
            "attention_mask": torch.ones(1, room, dtype=torch.int64),
            "cache_position": torch.tensor([length]),
            "key_0": cache,
            "value_0": cache.clone(),
        },
    }
    axes = {"pixel_values": 0, "image_features": 0, "key_0": 2, "value_0": 2, "attention_mask": 1}
    files, exported = {}, {}
    for name, module in programs.items():
        dynamic = {n: {axes[n]: any_size} if n in axes else {} for n in example[name]}
        if name == "prefill":
            dynamic["input_ids"] = {1: any_size}
        program = exported[name] = torch.export.export(module, (), example[name], dynamic_shapes=dynamic)
        facts = {**described(program), "cache": f"float32,key_0:1:{WIDTH},value_0:1:{WIDTH}"}
        files[name] = compile_program(program, as_eager=False, metadata=facts, weights_apart=weights is not None)
    write_package(folder / "toy.pt2", files)
    if weights is not None:
        Weights.of(exported, {name: names_of_weights(folder / "toy.pt2", name) for name in exported}).write(weights)
    return programs, folder / "toy.pt2"


@torch.no_grad()
def toy_answer(programs: dict[str, nn.Module], batch: dict[str, Tensor], longest: int) -> list[int]:
    """What the C++ program does, in Python."""
    length = batch["input_ids"].shape[1]
    cache = {name: torch.zeros(1, 1, length + longest, WIDTH) for name in ("key_0", "value_0")}
    ids, mask = batch["input_ids"], batch["attention_mask"]
    features = programs["vision"](batch["pixel_values"])["image_features"]
    logits = programs["prefill"](ids, mask, features, **cache)["logits"]
    full, tokens = torch.cat([mask, mask.new_zeros(1, longest)], 1), []
    for step in range(longest):
        tokens.append(int(logits.argmax()))
        full[:, length + step] = 1
        place = torch.tensor([length + step])
        logits = programs["decode"](torch.tensor([tokens[-1:]]), full, place, **cache)["logits"]
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["weights inside", "weights apart"])
def test_runner__feeds_and_carries_the_programs_tensors(apart: bool, tmp_path: Path) -> None:
    weights = tmp_path / "toy.safetensors" if apart else None
    programs, package = toy(tmp_path, weights)
    runner = build(tmp_path)
    for length, patches, longest in ((5, 3, 6), (11, 2, 9)):
        ids = torch.randint(VOCABULARY, (1, length))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(patches, WIDTH)}
        file = saved(batch, tmp_path / "question.safetensors")
        expected = toy_answer(programs, batch, longest)
        assert ask(runner, package, file, longest, -1, weights) == expected
        assert ask(runner, package, file, longest, expected[2], weights) == expected[: expected.index(expected[2]) + 1]


# --- the sample -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("config", [None, mmqc.recipes.mquant(4)], ids=["float32", "mquant-w4a8"])
def test_runner__answers_as_the_model_does(tmp_path: Path, config: mmqc.QuantConfig | None) -> None:
    sample = samples.load("digits-vqa")
    if config is not None:
        mmqc.quantize_(sample.model, config, sample.calibration(8), progress=False)
    programs = ["vision", "prefill", "decode"]
    package = mmqc.export(sample.model, sample.prompts(1)[0], tmp_path / "model.pt2", programs=programs)
    for got, expected in answers(build(tmp_path), package, sample.model, sample):
        assert got == expected


@pytest.mark.slow
def test_runner__sizes_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    from models import tiny_qwen2_vl

    model, batch = tiny_qwen2_vl()
    package = mmqc.export(model, batch, tmp_path / "model.pt2", programs=["vision", "prefill", "decode"])
    wrong = {**batch, "image_grid_thw": batch["image_grid_thw"] + 2}
    command = [str(build(tmp_path)), str(package), str(saved(wrong, tmp_path / "wrong.safetensors")), "3", "-1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "does not add up to the number of patches" in done.stderr
