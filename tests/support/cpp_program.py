"""The C++ program of examples/cpp_runner, built, and its inputs as files."""

import subprocess
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SOURCE = Path(__file__).resolve().parents[2] / "examples/cpp_runner/main.cpp"


def build(folder: Path) -> Path:
    """The program, as CMake builds it."""
    root, runner = Path(torch.__file__).parent, folder / "runner"
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    link = [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(["g++", "-std=c++20", "-O0", *include, str(SOURCE), "-o", str(runner), *link], check=True)
    return runner


def saved(batch: dict[str, Tensor], file: Path) -> Path:
    save_file({name: t.contiguous() for name, t in batch.items()}, file)
    return file
