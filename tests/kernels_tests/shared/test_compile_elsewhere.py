"""What another process compiled is found in the cache, without a GPU in either process, whatever each compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from mmqc.kernels.shared import compile_ahead
from mmqc.kernels.shared.launch import Launch, Shape, listed

SENDER = """
import contextlib, os, pickle, subprocess, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from mmqc.kernels.matmul import by_rows
from mmqc.kernels.shared import compile_elsewhere, device_facts

facts = dict(capability=lambda device: 90, multiprocessors=lambda device: 132, gpu_name=lambda device: "nvidia_h200",
             why_not_here=lambda *tensors: None)
for module in [m for name, m in sys.modules.items() if name.startswith("mmqc.kernels")]:
    for name in facts.keys() & vars(module).keys():
        setattr(module, name, facts[name])
torch.cuda.device = lambda device: contextlib.nullcontext()
driver.set_active(compile_elsewhere._Told(GPUTarget("cuda", 90, 32)))
triton.knobs.language.default_fp_fusion = False  # as from Triton 3.10 on; for the other process too

device, kernels = torch.device("cuda", 0), {}
for stored, dtype in ((4096, torch.int8), (2048, torch.uint8)):
    part = by_rows.Part(4096, stored, dtype, None, torch.bfloat16)
    for launch in by_rows.kernels_of(device, (torch.int8, 4096), 1, [part], None):
        kernels.setdefault(launch.kernel.__name__, launch)
if sys.argv[1] == "of Inductor":
    from torch._inductor.async_compile import AsyncCompile
    from mmqc.lowering import compile_elsewhere as pool

    pool.start()
    AsyncCompile.wait_pool_ready()
for name, launch in kernels.items():
    known = compile_elsewhere.sent(launch, device)
    if sys.argv[1] == "of Inductor":
        pool.submit(known).result()
    else:
        subprocess.run([sys.executable, "-c", sys.argv[2]], input=pickle.dumps(known), check=True)
    made = len(os.listdir(os.environ["TRITON_CACHE_DIR"]))
    assert launch.compile().metadata.enable_fp_fusion
    print(name, made, len(os.listdir(os.environ["TRITON_CACHE_DIR"])))
"""
OTHER = """
import os, pickle, sys
cache = os.environ.pop("TRITON_CACHE_DIR")
from mmqc.kernels.shared.compile_elsewhere import compile_sent
compile_sent(pickle.load(sys.stdin.buffer))
assert "torch.cuda" not in sys.modules or not sys.modules["torch.cuda"].is_initialized()
assert "TRITON_CACHE_DIR" not in os.environ
"""


@pytest.mark.slow
@pytest.mark.parametrize("process", ["its own", "of Inductor"])
def test_compile_sent__fills_the_cache_of_the_sender(tmp_path, process):
    """Kernels one after the other: the sender has compiled those before, each other process of its own has not."""
    bare = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", SENDER, process, OTHER], capture_output=True, text=True, cwd=Path(__file__).parents[3],
        env=bare | {"TRITON_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "2"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    counts = [tuple(map(int, line.split()[1:])) for line in run.stdout.splitlines()]
    assert counts == [(1, 1), (2, 2)]


def test_listed__nothing_runs_and_every_launch_is_there():
    launch = Launch(None, (1,), {"x_ptr": torch.zeros(2)}, {}, ("x_ptr",), 4, 1)
    with listed() as launches:
        assert launch.run() is None
    assert [one.args["x_ptr"] is launch.args["x_ptr"] for one in launches] == [True]


class Kernel:
    """Says that it was compiled."""

    __name__ = __qualname__ = "kernel"
    compiled = 0

    def warmup(self, **given: object) -> None:
        self.compiled += 1


@pytest.mark.parametrize("how", ["there", "not there yet", "closed"])
def test_hand_over__is_asked_first_and_what_it_does_not_do_is_done_here(monkeypatch, how):
    kernel, asked = Kernel(), []

    def submit(known):
        asked.append(known)
        if how == "closed":
            raise RuntimeError("the pool is closed")
        return compile_ahead.Future() if how == "there" else None

    monkeypatch.setattr(compile_ahead, "_elsewhere", [submit])
    monkeypatch.setattr(compile_ahead, "sent", lambda launch, device: launch.kernel)
    monkeypatch.setattr(compile_ahead.Future, "result", lambda future, timeout=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    x = Shape((4,), torch.float32, torch.device("cpu"))
    compile_ahead._compile(Launch(kernel, (1,), {"x_ptr": x}, {}, (), 4, 1), torch.device("cpu"))
    assert (asked, kernel.compiled) == ([kernel], 1)
