"""A launch of a kernel, compiled without a device: what ptxas says of it on Hopper, and the shared memory it takes.

    told, shared = compiled("test_packed_matmul", "two parts")      of ``test_packed_matmul.made("two parts")``
    shared = shared_memory(86, "test_hadamard_quantize", "18944")

In a process of its own, which Triton's interpreter has not taken over.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@functools.cache
def compiler() -> subprocess.Popen[str]:
    """A process of this script, for all kernels of a run: most of what one takes alone is the import of torch and Triton."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    rooms = sorted(str(path) for path in (HERE.parent / "kernels_tests").iterdir() if path.is_dir())
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *rooms, environment.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compiled(module: str, *what: Any) -> tuple[str, int]:
    """Ptxas's words for the kernel of ``module.made(*what)``, and bytes of shared memory."""
    told, shared, _ = _assembled(module, *what)
    return told, shared


def instructions(module: str, *what: Any) -> str:
    """What the kernel of ``module.made(*what)`` is on Hopper, as nvdisasm writes it."""
    return _assembled(module, *what)[2]


def _assembled(module: str, *what: Any) -> tuple[str, int, str]:
    nvidia = pytest.importorskip("triton.backends.nvidia.compiler")
    tools, ptxas = Path(nvidia.__file__).parent / "bin", nvidia.get_ptxas(90).path  # Triton has two of them; which one depends
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = f"{folder}/kernel.ptx", f"{folder}/kernel.cubin"
        shared = _ask(ptx, 90, module, *what)
        told, code = (
            subprocess.run(words, capture_output=True, text=True, timeout=300)
            for words in ([ptxas, "-v", "-arch=sm_90a", ptx, "-o", cubin], [str(tools / "nvdisasm"), cubin])
        )
        return told.stderr, shared, code.stdout


def shared_memory(architecture: int, module: str, *what: Any) -> int:
    """Bytes that the kernel of ``module.made(*what)`` takes on an architecture."""
    pytest.importorskip("triton.backends.nvidia")
    return _ask(os.devnull, architecture, module, *what)


def _ask(ptx: str, architecture: int, module: str, *what: Any) -> int:
    process = compiler()
    assert process.stdin
    assert process.stdout
    print(json.dumps([ptx, architecture, module, *map(str, what)]), file=process.stdin, flush=True)
    answer = json.loads(process.stdout.readline() or '"the compiler ended"')
    assert isinstance(answer, int), answer
    return answer


def spilled(told: str) -> int:
    """Bytes a thread stores because it has no register for them."""
    return int(told.split(" bytes spill stores")[0].split()[-1])


def compile_to(ptx: str, architecture: int, module: str, *what: str) -> int:
    """Compile; the bytes of shared memory."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from mmqc.kernels.shared.gluon_tiles import is_gluon

    launch = importlib.import_module(module).made(*what)
    names = {torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}
    names |= {torch.float32: "fp32", torch.bfloat16: "bf16"}
    kinds = {torch.int8: gl.int8, torch.uint8: gl.uint8, torch.bfloat16: gl.bfloat16}
    constants = launch.constants | ({"PTX": True} if "PTX" in launch.constants else {})

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        value = launch.args[name]
        if name in launch.descriptors:
            block = list(launch.descriptors[name])
            if not is_gluon(launch.kernel):
                return f"tensordesc<{names[value.dtype]}{block}>"
            layout = gl.NVMMASharedLayout.get_default_for(block, kinds[value.dtype])
            return f"tensordesc<{names[value.dtype]}[{', '.join(map(str, block))}],{layout!r}>"
        if isinstance(value, int):
            return "i32" if value < 1 << 31 else "i64"
        return "*" + names[value.dtype]

    types = {name: kind(name) for name in launch.kernel.arg_names}
    even = [
        name for name, kind in types.items() if name.endswith("_ptr") or (kind in ("i32", "i64") and launch.args[name] % 16 == 0)
    ]
    wide = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name in even}
    source = (GluonASTSource if is_gluon(launch.kernel) else ASTSource)(launch.kernel, types, constants, wide)
    made = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    )
    Path(ptx).write_text(made.asm["ptx"])
    return made.metadata.shared


def main() -> None:
    """Compile what stdin names, a line of JSON each; answer with the shared memory, or with what went wrong."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what else is printed is no answer
    for line in sys.stdin:
        try:
            answer: int | str = compile_to(*json.loads(line))
        except Exception:
            answer = traceback.format_exc()[-2000:]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
