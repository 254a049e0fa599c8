"""The C++ program answers questions about images with the same tokens as the model."""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import mmqc
from mmqc import samples
from mmqc.samples.processor import END

SOURCE = Path(__file__).resolve().parents[1] / "examples/cpp_runner/main.cpp"
QUESTIONS = 20


def build(folder: Path) -> Path:
    """The program, as CMake builds it."""
    root, runner = Path(torch.__file__).parent, folder / "runner"
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    link = [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(["g++", "-std=c++20", "-O1", *include, str(SOURCE), "-o", str(runner), *link], check=True)
    return runner


def answers(
    runner: Path, package: Path, model: nn.Module, sample: samples.sample.Sample
) -> list[tuple[list[int], list[int]]]:
    """Tokens of the program and of the model."""
    found = []
    for number, question in enumerate(sample.questions(QUESTIONS)):
        batch = sample.processor(question.prompt, question.images)
        longest = len(question.answer) + 1
        file = package.parent / f"{number}.safetensors"
        save_file({name: t.contiguous() for name, t in batch.items()}, file)
        command = [str(runner), str(package), str(file), str(longest), str(END)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        expected = model.generate(**batch, max_new_tokens=longest, do_sample=False)[0, batch["input_ids"].shape[1] :]
        found.append(([int(t) for t in done.stdout.split()], expected.tolist()))
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runner__answers_as_the_model_does(tmp_path: Path) -> None:
    sample = samples.load("digits-vqa")
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
    save_file(wrong, tmp_path / "wrong.safetensors")
    command = [str(build(tmp_path)), str(package), str(tmp_path / "wrong.safetensors"), "3", "-1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "does not add up to the number of patches" in done.stderr
