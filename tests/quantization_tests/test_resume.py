"""A run that was killed goes on where it stopped, and ends with the same model bit for bit."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import forked
import killed
import pytest
import torch
from often import often
from safetensors.torch import load_file
from small_vlm import Small, batches, check_unchanged, quantize, traces
from torch import nn

import mmqc.quantization.resume
from mmqc import recipes
from mmqc.config import ActivationSpec, QuantConfig, Scheme, WeightSpec
from mmqc.quantization.resume import ResumeError

CONFIG = recipes.mquant(4)
PERCENTILE = ActivationSpec(per_modality=True, observer="percentile", percentile=0.999)
RECIPES = {
    "mquant": CONFIG,
    "percentile": QuantConfig(*[Scheme(WeightSpec(4, solver="gptq"), PERCENTILE)] * 3),
    "resq": recipes.resq(kv_bits=None),
    "quik": recipes.quik(),
}
UNITS = 5  # two blocks in each tower, and the merger; the head is kept


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class Stop(KeyboardInterrupt):
    """As if the user had pressed a key."""


def stopped_after(units: int, monkeypatch: pytest.MonkeyPatch, folder: Path, config: Any, **more: Any) -> nn.Module:
    """A model whose quantization was stopped when so many units were stored."""
    real, left = mmqc.quantization.resume.Store.save, [units]

    def save(self: Any, linears: Any, unit: Any) -> None:
        if not left[0]:
            raise Stop
        left[0] -= 1
        real(self, linears, unit)

    model = Small()
    before = traces(model)
    with monkeypatch.context() as patch:
        patch.setattr(mmqc.quantization.resume.Store, "save", save)
        with pytest.raises(Stop):
            quantize(model, config, resume_dir=str(folder), **more)
    check_unchanged(model, before)
    return model


@pytest.mark.parametrize("inputs", ["float", "quantized", "asymmetric"])
@pytest.mark.parametrize("recipe", often(RECIPES, "resq"))
def test_resume__after_every_unit(recipe: str, inputs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, expected = RECIPES[recipe], Small()
    report = quantize(expected, config, inputs=inputs)
    for units in range(0, UNITS, 2 if recipe == "mquant" else 3) if recipe != "resq" else (2,):
        folder = tmp_path / str(units)
        model = stopped_after(units, monkeypatch, folder, config, inputs=inputs)
        assert len(list(folder.glob("*.safetensors"))) == units
        again = quantize(model, config, resume_dir=str(folder), inputs=inputs)
        assert same(state(model), state(expected))
        assert again.config == report.config
        assert [(x.sqnr, x.ranges, x.weight_error) for x in again.layers] == [
            (x.sqnr, x.ranges, x.weight_error) for x in report.layers
        ]


def test_resume__floats_of_4_bits(tmp_path: Path) -> None:
    model, other = Small(), Small()
    config = mmqc.recipes.gptq(4).with_float4("nvfp4")
    quantize(model, config, resume_dir=str(tmp_path))
    quantize(other, config, resume_dir=str(tmp_path))
    assert any("weight_divisor" in name for name in state(model))
    assert same(state(model), state(other))


@pytest.mark.parametrize(("recipe", "solver"), [("mquant", "quantize_weights"), ("quik", "quantize_mixed")])
def test_resume__a_finished_job_is_loaded_without_solving(
    recipe: str, solver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = Small(), Small()
    quantize(model, RECIPES[recipe], resume_dir=str(tmp_path))
    monkeypatch.setattr(f"mmqc.passes.{solver}.solve", None)
    quantize(other, RECIPES[recipe], resume_dir=str(tmp_path))
    assert same(state(model), state(other))
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize("what", ["config", "model", "calibration set", "options"])
def test_resume__another_job_is_refused(what: str, tmp_path: Path) -> None:
    quantize(Small(), CONFIG, resume_dir=str(tmp_path))
    model, data, config, more = Small(), batches(), CONFIG, {}
    if what == "config":
        config = recipes.mquant(8)
    elif what == "model":
        with torch.no_grad():
            model.model.merger.mlp.up.weight[0, 0] += 1
    elif what == "calibration set":
        data = data[:2]
    else:
        more = {"inputs": "quantized"}
    before = traces(model)
    with pytest.raises(ResumeError, match=f"its {what} differs"):
        quantize(model, config, data, resume_dir=str(tmp_path), **more)
    check_unchanged(model, before)


def test_resume__damaged_files_are_refused(tmp_path: Path) -> None:
    quantize(Small(), CONFIG, resume_dir=str(tmp_path))
    path = next(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    model = Small()
    before = traces(model)
    with pytest.raises(ResumeError, match="is damaged or missing; delete"):
        quantize(model, CONFIG, resume_dir=str(tmp_path))
    check_unchanged(model, before)


def test_resume__every_flipped_bit_of_the_json_is_noticed(tmp_path: Path) -> None:
    quantize(Small(), CONFIG, resume_dir=str(tmp_path))
    draw = random.Random(0)
    for path in tmp_path.glob("*.json"):
        good, content = path.read_bytes(), json.loads(path.read_text())
        for _ in range(100):
            data = bytearray(good)
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(bytes(data))
            with suppress(ResumeError):
                read = mmqc.quantization.resume._read_json(path)
                assert read == {k: v for k, v in content.items() if k != mmqc.quantization.resume.DIGEST}  # a space, at most
        path.write_bytes(good)


@pytest.mark.parametrize(("pattern", "what"), [("job.json", "delete the folder"), ("model*.json", "to compute its unit again")])
def test_resume__damaged_json_is_refused(pattern: str, what: str, tmp_path: Path) -> None:
    quantize(Small(), CONFIG, resume_dir=str(tmp_path))
    path = next(tmp_path.glob(pattern))
    path.write_text(path.read_text().replace('"c', '"d', 1))
    model = Small()
    before = traces(model)
    with pytest.raises(ResumeError, match=rf"{re.escape(str(path))} is damaged.*{what}"):
        quantize(model, CONFIG, resume_dir=str(tmp_path))
    check_unchanged(model, before)


def test_resume__half_written_files_count_for_nothing(tmp_path: Path) -> None:
    expected, model = Small(), Small()
    quantize(expected, CONFIG, resume_dir=str(tmp_path))
    for path in list(tmp_path.glob("*.json"))[1:3]:
        if path.name != "job.json":
            path.rename(path.with_name(f".{path.name}.part"))
    quantize(model, CONFIG, resume_dir=str(tmp_path))
    assert same(state(model), state(expected))
    assert all(json.loads(p.read_text()) for p in tmp_path.glob("*.json"))


def killed_run(case: str, folder: Path, after: float) -> bool:
    """Start, wait, kill -9; whether it was still running."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = folder.with_suffix(".safetensors")
    command = [sys.executable, killed.__file__, case, str(folder), str(result)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    process.stdout.readline()
    deadline = time.monotonic() + after
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    running = process.poll() is None
    if running:
        process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert running or process.returncode == 0
    return running


@pytest.mark.slow
def test_resume__killed_in_the_middle(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = forked.started(killed.__file__, "small/float", str(folder), str(tmp_path / "x.safetensors"), env=environment)
    while process.poll() is None and not list(folder.glob("[!j]*.json")):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list(folder.glob("[!j]*.json")))
    assert done >= 1
    assert same(state(killed.quantized("small", str(folder))), state(killed.quantized("small", None)))


@pytest.mark.slow
@pytest.mark.timeout(3000)  # twelve processes that import, record and quantize: each takes a minute on a busy machine
@pytest.mark.parametrize("inputs", ["float", "quantized"])
def test_resume__killed_ten_times_on_the_sample(inputs: str, tmp_path: Path) -> None:
    start = time.monotonic()
    expected = state(killed.quantized("sample", None, inputs=inputs))
    whole = time.monotonic() - start
    draw = random.Random(0)
    folder, kills = tmp_path / "job", 0
    for _ in range(10):
        kills += killed_run(f"sample/{inputs}", folder, draw.uniform(0.2, 1.0) * whole)
    assert kills >= 3
    assert not killed_run(f"sample/{inputs}", folder, 600)
    assert same(load_file(folder.with_suffix(".safetensors")), expected)
