"""What a command knows of the processes that torchrun started beside it, and the command itself under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmqc.checkpoint.checksum import hashes
from mmqc.distributed import torchrun

ROOT = Path(__file__).parents[2]


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the second of two on this machine, of four in all."""
    values = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_alone__nothing_is_different(monkeypatch):
    for name in torchrun.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert (torchrun.started(), torchrun.first(), torchrun.here(), torchrun.own_device("cuda")) == (False, True, 1, "cuda")
    with torchrun.process_group():
        assert not torch.distributed.is_initialized()


@pytest.mark.usefixtures("second")
def test_started__each_has_a_device_of_its_own():
    assert (torchrun.started(), torchrun.first(), torchrun.here()) == (True, False, 2)
    assert [torchrun.own_device(d) for d in ("cuda", "cuda:3", "cpu", None)] == ["cuda:1", "cuda:3", "cpu", None]


@pytest.mark.usefixtures("second")
def test_process_group__refuses_to_share_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 processes on a machine with 1 GPUs"), torchrun.process_group():
        pass


@pytest.mark.slow
def test_command__writes_once_what_one_process_writes(tmp_path):
    from safetensors.torch import load_file

    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    many, one = tmp_path / "many", tmp_path / "one"
    command = ["mmqc", "quantize", "digits-vqa", "-r", "gptq", "--calibration", "5", "--out"]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", *command, str(many)]
    done = subprocess.run(start, env=env, cwd=tmp_path, text=True, capture_output=True, check=True)
    subprocess.run([sys.executable, "-m", *command, str(one)], env=env, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.count(f"saved in {many}") == 1
    assert "2 times on this machine" in done.stdout
    assert {p.name for p in many.iterdir()} == {p.name for p in one.iterdir()}
    assert hashes(load_file(many / "model.safetensors")) == hashes(load_file(one / "model.safetensors"))
