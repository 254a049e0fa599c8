"""Runs the folder in a process of its own where Triton was imported before its interpreter could be asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")


def test_interpreter__kernels_run_in_a_fresh_process():
    interpreted = not isinstance(triton.language.zeros, triton.JITFunction)
    if interpreted or torch.cuda.is_available():
        pytest.skip("the folder's tests run in this process")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", str(Path(__file__).parent)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
