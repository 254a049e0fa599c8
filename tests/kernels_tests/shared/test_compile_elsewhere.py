"""Kernels compiled by other processes: the cache has what the first one looks for, and a failure there costs time alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from mmqc.kernels.shared import compile_elsewhere as module


class Kernel:
    """What is asked of a kernel of Triton's."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.fn = SimpleNamespace(__module__="some.module", __qualname__="some_kernel")
        self.compile: Any = self._compile

    def _compile(self, src: Any, target: Any = None, options: Any = None, **more: Any) -> str:
        self.compiled.append((src.signature, target, options, more))
        return "compiled"


SOURCE = SimpleNamespace(signature={"x": "*fp32"}, constants={(1,): 8}, attrs={})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def submit(*args: Any) -> Future[Any]:
        found.append(args)
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr(module, "_submit", [submit])
    return found


def test_elsewhere__asks_another_process_first_in_this_thread_alone(asked: list[Any]) -> None:
    kernel = Kernel()
    with module.elsewhere(kernel):
        assert kernel.compile(SOURCE, target="sm_90", options={"num_warps": 4}, _env_vars={}) == "compiled"
        other = threading.Thread(target=kernel.compile, args=(SOURCE,))
        other.start()
        other.join()
    kernel.compile(SOURCE)
    assert len(kernel.compiled) == 3
    assert kernel.compiled[0] == ({"x": "*fp32"}, "sm_90", {"num_warps": 4}, {"_env_vars": {}})
    [(function, of, name, *rest)] = asked
    assert (function, of, name) == (module.into_cache, "some.module", "some_kernel")
    assert rest[:3] == [(SimpleNamespace, {"x": "*fp32"}, {(1,): 8}, {}), "sm_90", {"num_warps": 4}]


@pytest.mark.parametrize("raises", [True, False])
def test_elsewhere__compiles_here_whatever_happens_there(monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    def submit(*args: Any) -> Future[Any] | None:
        if not raises:
            return None
        failed: Future[Any] = Future()
        failed.set_exception(RuntimeError("no memory"))
        return failed

    monkeypatch.setattr(module, "_submit", [submit])
    kernel = Kernel()
    with module.elsewhere(kernel):
        assert kernel.compile(SOURCE) == "compiled"


def test_elsewhere__leaves_kernels_alone_where_nobody_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_submit", [])
    kernel = Kernel()
    compiler = kernel.compile
    with module.elsewhere(kernel):
        assert kernel.compile == compiler


BOTH = """
import base64, pickle, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from mmqc.kernels.attention import segment_attention as attention
from mmqc.kernels.shared import compile_elsewhere
from mmqc.kernels.shared.split_k import workspace

driver.set_active(SimpleNamespace(  # Triton compiles for a device that is not there
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda device: 0,
))
folder, files = Path(knobs.cache.dir), []

def submit(function, *args):
    job = base64.b64encode(pickle.dumps((function, args))).decode()
    code = "import base64, pickle; f, a = pickle.loads(base64.b64decode(input())); f(*a)"
    subprocess.run([sys.executable, "-c", code], input=job, text=True, check=True)
    files.append({p.name for p in folder.rglob("*")})

compile_elsewhere.use(submit)
q = torch.empty((1, 2, 128, 64), dtype=torch.bfloat16, device="meta")
launch = attention.launch(q, q, q, torch.empty(2, dtype=torch.int32, device="meta"), q, None, workspace)
launch.kernel.device_caches[0]
with compile_elsewhere.elsewhere(launch.kernel):
    code = launch.compile()
assert "wgmma" in code.asm["ptx"]
assert files[0] and {p.name for p in folder.rglob("*")} == files[0], "what was compiled there was not found here"
print("found")
"""


def test_into_cache__is_found_by_the_process_that_asked(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", BOTH], env=environment, capture_output=True, text=True, timeout=400)
    assert done.stdout.strip().endswith("found"), done.stderr[-3000:]
