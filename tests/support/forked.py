"""Python in a process of its own that has torch and transformers imported, and nothing of mmqc: their import takes seven seconds.

    done = run("-c", "import sys; print(sys.argv)", "a")          child = started("-m", "mmqc.cli", "eval")

The process is a copy of one that was started for this (multiprocessing's fork server), at the first use in a pytest worker;
with a GPU it is a new one, as copies can't use GPUs.
What has to import for itself, or in a certain order, is started by subprocess.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

IMPORTED = [
    *("torch", "torch.distributed.distributed_c10d", "torchao.quantization", "safetensors.torch"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "transformers.quantizers.auto"),
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
]
# What is imported looks for GPUs, and a copy of a process that has found one can't use it.
_processes: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
_processes.set_forkserver_preload(IMPORTED)


def _begin(words: tuple[str, ...], folder: str, cwd: str, environment: Mapping[str, str]) -> None:
    """What the python command does with ``words``, its output in two files of ``folder``."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in environment)  # type: ignore[union-attr]
    sys.argv = ["-c", *words[2:]] if words[0] == "-c" else list(words["-m" in words[:1] :])
    if words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


class Child:
    """A process under way; the part of ``subprocess.Popen`` that the tests use."""

    def __init__(self, words: tuple[str, ...], cwd: str, environment: Mapping[str, str]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="mmqc-forked-")
        self.args = words
        self.process: Any = _processes.Process(target=_begin, args=(words, self.folder.name, cwd, dict(environment)), daemon=True)
        self.process.start()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it is under way."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(stdout, stderr), once it has ended."""
        self.wait(timeout)
        out, err = (Path(self.folder.name) / name for name in ("stdout", "stderr"))
        return (out.read_text() if out.exists() else ""), (err.read_text() if err.exists() else "")


def started(*words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Child:
    """``python words ...``, under way."""
    return Child(words, str(cwd or Path.cwd()), os.environ if env is None else env)


def run(*words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 300) -> Any:
    """``python words ...``: a ``CompletedProcess`` with what it wrote; killed if it takes longer."""
    child = started(*words, cwd=cwd, env=env)
    try:
        out, err = child.communicate(timeout)
    except subprocess.TimeoutExpired:
        child.process.kill()
        raise
    return subprocess.CompletedProcess(words, child.poll() or 0, out, err)
