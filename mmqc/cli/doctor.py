"""What this environment can do: versions, devices, compiler, a compiled integer matmul, and what would fall back."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from mmqc.versions import installed, numbers

Status = Literal["ok", "note", "problem"]

SUPPORTED = {  # as in pyproject.toml: the first version that works, and the first that nobody tried
    "torch": ((2, 11), (2, 16)),
    "transformers": ((5, 17), (5, 25)),
    "torchao": ((0, 17), (0, 19)),
}
TRITON_OF_TORCH = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}  # what the CUDA builds of torch name


@dataclass(frozen=True)
class Check:
    """One line of the report: what was looked at, what was found, what follows from it, and what a check that failed raised."""

    name: str
    found: str
    status: Status = "ok"
    advice: str = ""
    error: Exception | None = None


def examine(smoke: bool = True) -> list[Check]:
    """All checks, in the order of the report; `smoke` compiles a small graph, which takes some seconds."""
    checks = [_python(), *_packages(), _triton(), *_devices(), _compiler(), _headers(), _backend(), *_extras()]
    return [*checks, _guard("compiled int8", _smoke)] if smoke else checks


def fallbacks(checks: list[Check]) -> list[str]:
    """What runs differently here than where everything is present, one sentence each."""
    return [f"{c.name}: {c.advice}" for c in checks if c.status != "ok" and c.advice]


def sound(checks: list[Check]) -> bool:
    """Whether nothing stands in the way of quantizing and compiling."""
    return all(c.status != "problem" for c in checks)


def environment() -> dict[str, str]:
    """What a page of figures says about where they come from: versions, processor, accelerators, day."""
    import torch

    found = {name: installed(name) or "not installed" for name in ("mmqc", *SUPPORTED, "triton")}
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    threads = torch.get_num_threads()
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''}"
    return {
        **found,
        "python": platform.python_version(),
        "cpu": cpu,
        **({"gpu": ", ".join(dict.fromkeys(devices))} if devices else {}),
        "date": time.strftime("%Y-%m-%d"),
    }


def _python() -> Check:
    found = platform.python_version()
    if numbers(found) >= (3, 11):
        return Check("python", found)
    return Check("python", found, "problem", "mmqc needs Python 3.11 or newer")


def _packages() -> Iterator[Check]:
    for package, (first, beyond) in SUPPORTED.items():
        found = installed(package)
        wanted = f"{'.'.join(map(str, first))} or newer, below {'.'.join(map(str, beyond))}"
        if found is None:
            yield Check(package, "not installed", "problem", f"install {package} {wanted}")
        elif first <= numbers(found) < beyond:
            yield Check(package, found)
        else:
            yield Check(package, found, "problem", f"supported: {wanted}")


def _triton() -> Check:
    found, torch_version = installed("triton"), installed("torch") or ""
    expected = TRITON_OF_TORCH.get(".".join(torch_version.split(".")[:2]))
    if found is None:
        return Check("triton", "not installed", "note", "no GPU kernels; the interpreter tests are skipped")
    if expected and not found.startswith(expected):
        return Check("triton", found, "note", f"torch {torch_version} is built for triton {expected}")
    return Check("triton", found)


def _devices() -> Iterator[Check]:
    import torch

    yield Check("cpu", environment()["cpu"])
    reason = _why_not_int_mm()
    if reason:
        yield Check("int8 on cpu", reason.split(":")[0], "note", reason)
    if not torch.cuda.is_available():
        yield Check("cuda", "no device", "note", "everything runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        yield Check(f"cuda:{index}", f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB")


def _why_not_int_mm() -> str | None:
    from mmqc.ops.integer_matmul import why_not_int_mm

    return why_not_int_mm("cpu", True, 64, 64)


def _compiler() -> Check:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        advice = "torch.compile cannot build C++ code: install g++, or point CXX at a compiler"
        return Check("C++ compiler", f"{name} not found", "problem", advice)
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return Check("C++ compiler", (done.stdout.splitlines() or [path])[0])


def _headers() -> Check:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if header.exists():
        return Check("Python headers", str(header.parent))
    advice = "torch.compile's C++ wrappers need them: install the development files of this Python"
    return Check("Python headers", "not found", "problem", advice)


def _backend() -> Check:
    found = [e.value for e in entry_points(group="torch_dynamo_backends") if e.name == "mmqc"]
    if found:
        return Check("backend entry point", found[0])
    advice = 'mmqc is not installed as a distribution: `import mmqc` before torch.compile(..., backend="mmqc")'
    return Check("backend entry point", "none", "note", advice)


def _extras() -> Iterator[Check]:
    needs = {
        "scikit-learn": "the samples need it (extra: demo)",
        "torchvision": "processors of Qwen2-VL, InternVL and others need it: the one that goes with this torch",
        "matplotlib": "reports have no plots without it (extra: report)",
        "compressed-tensors": "transformers needs it to load what save_pretrained(format=...) wrote (extra: formats)",
    }
    for package, advice in needs.items():
        found = installed(package)
        yield Check(package, found) if found else Check(package, "not installed", "note", advice)


def _guard(name: str, check: Callable[[], Check]) -> Check:
    """The check, or what it died of: a broken compiler shows itself as any exception there is."""
    try:
        return check()
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return Check(name, f"{type(error).__name__}: {reason}"[:200], "problem", "compiled graphs do not work here", error)


def _smoke() -> Check:
    """A quantized linear, compiled by the backend, against the same ops run eagerly."""
    import torch

    from mmqc.backend import backend
    from mmqc.ops import quantize, scaled_matmul  # noqa: F401  (importing them defines torch.ops.mmqc)

    ops = torch.ops.mmqc
    generator = torch.Generator().manual_seed(0)
    w_q = torch.randint(-128, 128, (32, 64), dtype=torch.int8, generator=generator)
    x = torch.randn(24, 64, generator=generator)
    x_scale, w_scale, bias = torch.tensor([0.02]), torch.full((32,), 0.01), torch.randn(32, generator=generator)

    def linear(x: torch.Tensor) -> torch.Tensor:
        x_q = ops.quantize(x, x_scale, None, 8)
        return ops.scaled_matmul(x_q, w_q, x_scale, w_scale, bias, None, 8, torch.float32)

    start = time.perf_counter()
    with torch.no_grad():
        got = torch.compile(linear, backend=backend)(x)
    seconds = time.perf_counter() - start
    error = (got - linear(x)).abs().max().item()
    if error > 1e-4:
        return Check("compiled int8", f"differs from eager by {error:.1e}", "problem", "do not trust compiled results")
    return Check("compiled int8", f"equals eager (largest difference {error:.0e}), {seconds:.1f} s with compilation")
