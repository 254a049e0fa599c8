"""A launch of a kernel, compiled for Hopper without a device: what ptxas says of it, and the shared memory it takes.

    told, shared = compiled("test_packed_matmul", "two parts")      of ``test_packed_matmul.made("two parts")``

In a process of its own, which Triton's interpreter has not taken over.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def compiled(module: str, *what: Any) -> tuple[str, int]:
    """Ptxas's words for the kernel of ``module.made(*what)``, and bytes of shared memory."""
    nvidia = pytest.importorskip("triton.backends.nvidia")
    ptxas = Path(nvidia.__path__[0]) / "bin" / "ptxas"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    rooms = sorted(str(path) for path in (HERE.parent / "kernels_tests").iterdir() if path.is_dir())
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *rooms, environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        ptx = f"{folder}/kernel.ptx"
        command = [sys.executable, __file__, ptx, module, *map(str, what)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        command = [str(ptxas), "-v", "-arch=sm_90a", ptx, "-o", f"{folder}/kernel.cubin"]
        return subprocess.run(command, capture_output=True, text=True, timeout=300).stderr, int(done.stdout)


def spilled(told: str) -> int:
    """Bytes a thread stores because it has no register for them."""
    return int(told.split(" bytes spill stores")[0].split()[-1])


def main(ptx: str, module: str, *what: str) -> None:
    """Compile, and print the shared memory."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from mmqc.kernels.shared.gluon_tiles import is_gluon

    launch = importlib.import_module(module).made(*what)
    names = {torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.float32: "fp32", torch.bfloat16: "bf16"}
    kinds = {torch.int8: gl.int8, torch.uint8: gl.uint8, torch.bfloat16: gl.bfloat16}
    constants = launch.constants | ({"PTX": True} if "PTX" in launch.constants else {})

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        value = launch.args[name]
        if name in launch.descriptors:
            block = list(launch.descriptors[name])
            layout = gl.NVMMASharedLayout.get_default_for(block, kinds[value.dtype])
            return f"tensordesc<{names[value.dtype]}[{', '.join(map(str, block))}],{layout!r}>"
        return "i32" if isinstance(value, int) else "*" + names[value.dtype]

    types = {name: kind(name) for name in launch.kernel.arg_names}
    wide = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name.endswith("_ptr") or name in ("M", "N", "STORED")
    }
    source = (GluonASTSource if is_gluon(launch.kernel) else ASTSource)(launch.kernel, types, constants, wide)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": launch.num_warps})
    Path(ptx).write_text(made.asm["ptx"])
    print(made.metadata.shared)


if __name__ == "__main__":
    main(*sys.argv[1:])
