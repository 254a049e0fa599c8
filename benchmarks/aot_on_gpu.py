"""Why a package of one nn.Linear crashes when a fresh process loads it: each hypothesis in a process of its own.

    python benchmarks/aot_on_gpu.py [--out aot.json] [--seconds 500] [--device cpu|cuda] [--dry]

| if this alone works ...               | ... the cause is                                                                      |
|---------------------------------------|---------------------------------------------------------------------------------------|
| same process                          | what the compiling process has loaded and a fresh one has not (see ``imports``)       |
| imports                               | the loader needs a library that torch._inductor brings in: order of loading           |
| bare library, not package             | the package loader, before any code of ours: unpacking, metadata, std::filesystem     |
| C++ program, not Python               | a library of the Python process: another libstdc++, libgomp or libtorch               |
| no weights                            | the object file with the constants                                                    |
| no constants by assembler             | the same, how it is built                                                             |
| no precompiled header                 | the header precompiled by this g++                                                    |
| wrapper -O0                           | this g++'s optimiser                                                                  |
| other compiler                        | this g++                                                                              |
| another temporary folder              | the folder: full, or not executable                                                   |
| system libstdc++ first                | two versions of libstdc++                                                             |
| nothing, not even ``dlopen``          | static initialisers of the library; the backtrace says which                          |

Every failure is printed with its signal, the last Python line (faulthandler) and gdb's backtrace where there is gdb.  The libraries
that are mapped more than once, and what the compiled library resolves to (readelf, ldd), come first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

BUILD = """if True:
    import json, sys, torch
    package, device, options, weights = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4] == "weights"
    torch.manual_seed(0)
    model = (torch.nn.Linear(8, 8) if weights else torch.nn.ReLU()).to(device).eval()
    x = torch.ones(2, 8, device=device)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
    torch.save(model(x).cpu(), package + ".expected")
"""
CHECK = """
    expected = torch.load(package + ".expected")
    y = run(torch.ones(2, 8, device=device))
    y = (y[0] if isinstance(y, (list, tuple)) else y).cpu()
    assert torch.allclose(y, expected, rtol=1e-4, atol=1e-5), (y, expected)
"""
START = "if True:\n    import sys, torch\n    package, device = sys.argv[1:3]\n"
LOADS = {
    "package": START + "    run = torch._inductor.aoti_load_package(package)" + CHECK,
    "package, loader alone": START
    + "    loader = torch._C._aoti.AOTIModelPackageLoader(package, 'model', False, 1, -1)\n"
    + "    run = lambda x: loader.boxed_run([x])"
    + CHECK,
    "imports": START
    + "    import torch._dynamo, torch._inductor.compile_fx, torch._inductor.codecache\n"
    + "    run = torch._inductor.aoti_load_package(package)"
    + CHECK,
    "cuda first": START
    + "    torch.cuda.is_available() and torch.zeros(1, device='cuda')\n"
    + "    run = torch._inductor.aoti_load_package(package)"
    + CHECK,
    "dlopen": START + "    import ctypes, os\n    ctypes.CDLL(sys.argv[3], mode=os.RTLD_NOW)\n",
    "dlopen, lazily": START + "    import ctypes, os\n    ctypes.CDLL(sys.argv[3], mode=os.RTLD_LAZY)\n",
    "bare library": START + "    run = torch._export.aot_load(sys.argv[3], device)" + CHECK,
    "mapped": START
    + "    import re\n    try:\n        torch._inductor.aoti_load_package(package)\n    finally:\n"
    + "        maps = open('/proc/self/maps').read()\n"
    + "        print('\\n'.join(sorted(set(re.findall(r'/\\S*(?:stdc\\+\\+|gomp|iomp|torch|c10)\\S*\\.so\\S*', maps)))))\n",
}
MAIN = """
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <cstdio>
int main(int, char** arguments) {
  torch::inductor::AOTIModelPackageLoader loader(arguments[1]);
  std::printf("%zu outputs\\n", loader.run({at::ones({2, 8})}).size());
}
"""
BUILDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no precompiled header": {"aot_inductor.precompile_headers": False},
    "wrapper -O0": {"aot_inductor.compile_wrapper_opt_level": "O0"},
    "no constants by assembler": {"aot_inductor.use_consts_asm_build": False},
    "no vector instructions": {"cpp.simdlen": 1},
}


class Job:
    """Processes under one time limit, and what became of them."""

    def __init__(self, seconds: float, folder: Path, device: str) -> None:
        self.end, self.folder, self.device = time.monotonic() + seconds, folder, device
        self.rows: list[dict[str, Any]] = []

    def run(self, name: str, command: list[str], **environment: str) -> bool:
        """One process; whether it ended well."""
        left = self.end - time.monotonic()
        if left < 1:
            self.rows.append({"step": name, "result": "not run: out of time"})
            return False
        started = time.monotonic()
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=left,
                env={**os.environ, **environment},
                cwd=self.folder,
            )
            result = "ok" if done.returncode == 0 else _why(done.returncode)
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        except subprocess.TimeoutExpired:
            result, tail = "timeout", ""
        row = {"step": name, "result": result, "seconds": round(time.monotonic() - started, 1)}
        self.rows.append(row if result == "ok" else {**row, "tail": tail})
        print(f"{name:45} {result:12} {row['seconds']:6.1f} s", flush=True)
        if result != "ok":
            print("    " + tail.replace("\n", "\n    "), flush=True)
        return result == "ok"

    def python(self, name: str, code: str, *arguments: str, **environment: str) -> bool:
        """One Python process."""
        return self.run(name, [sys.executable, "-X", "faulthandler", "-c", code, *arguments], **environment)

    def build(self, name: str, options: dict[str, Any], weights: bool = True, **environment: str) -> Path | None:
        """A package, compiled in a process and a cache of its own."""
        stem = name.replace(" ", "_").replace(",", "")
        package = self.folder / f"{stem}.pt2"
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"cache_{stem}")}
        kind = "weights" if weights else "none"
        arguments = (str(package), self.device, json.dumps(options), kind)
        return package if self.python(f"build: {name}", BUILD, *arguments, **{**cache, **environment}) else None

    def load(self, name: str, how: str, package: Path, **environment: str) -> bool:
        """One way to load it."""
        return self.python(f"load: {name}", LOADS[how], str(package), self.device, library(package), **environment)


def _why(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def library(package: Path) -> str:
    """The compiled library of a package, unpacked beside it."""
    with zipfile.ZipFile(package) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".so")]
        target = package.with_suffix(".so")
        if not target.exists():
            target.write_bytes(archive.read(name))
    return str(target)


def backtrace(job: Job, package: Path) -> None:
    """Of the crash, by gdb."""
    if shutil.which("gdb"):
        command = [
            "gdb",
            "-batch",
            "-ex",
            "run",
            "-ex",
            "bt 30",
            "-ex",
            "info sharedlibrary",
            "--args",
            sys.executable,
            "-c",
        ]
        job.run("gdb", ["bash", "-c", '"$@"; exit 1', "bash", *command, LOADS["package"], str(package), job.device])
    else:
        print("no gdb: install it for a backtrace")


def facts(job: Job, package: Path) -> None:
    """What the library needs, where that is found, and what is mapped twice."""
    so = library(package)
    for name, command in {
        "compiler": ["bash", "-c", "${CXX:-g++} --version | head -1; ldd --version | head -1; ld --version | head -1"],
        "needs": ["bash", "-c", f"readelf -d {so} | grep -E 'NEEDED|RPATH|RUNPATH'"],
        "resolves to": ["ldd", so],
        "initialisers": ["bash", "-c", f"readelf -S {so} | grep -E 'init_array|ctors|ldata|lrodata'"],
        "disk": ["df", "-h", tempfile.gettempdir(), "/dev/shm"],
    }.items():
        done = subprocess.run(command, capture_output=True, text=True)
        print(f"--- {name}\n{done.stdout}{done.stderr}", flush=True)
        job.rows.append({"step": name, "output": done.stdout})


def cpp(job: Job, package: Path) -> None:
    """Without Python."""
    if job.device != "cpu":
        return
    source, program, root = job.folder / "main.cpp", job.folder / "main", Path(torch.__file__).parent
    source.write_text(MAIN)
    flags = ["-std=c++20", f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    links = [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    if job.run("build: C++ program", [os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(program), *links]):
        job.run("load: C++ program", [str(program), str(package)])


def same_process(device: str, package: Path) -> None:
    """Compile and load here; the last step, because it may crash."""
    model = nn.Linear(8, 8).to(device).eval()
    x = torch.ones(2, 8, device=device)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=str(package))
        run = torch._inductor.aoti_load_package(str(package))
        print("same process:", (run(x) - model(x)).abs().max().item())


def examine(job: Job, dry: bool) -> None:
    """Every step, those that tell most first."""
    package = job.build("plain", BUILDS["plain"])
    if package is None:
        return
    facts(job, package)
    well = job.load("package", "package", package)
    for how in ("dlopen", "dlopen, lazily", "bare library", "package, loader alone", "imports", "cuda first", "mapped"):
        job.load(how, how, package)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        job.load("another temporary folder", "package", package, TMPDIR=elsewhere)
    found = subprocess.run(
        ["bash", "-c", "${CXX:-g++} -print-file-name=libstdc++.so.6"], capture_output=True, text=True
    )
    job.load("system libstdc++ first", "package", package, LD_PRELOAD=found.stdout.strip())
    cpp(job, package)
    if not dry:
        if not well:
            backtrace(job, package)
        rebuild(job)


def rebuild(job: Job) -> None:
    """Built in other ways."""
    bare = job.build("no weights", {}, weights=False)
    if bare is not None:
        job.load("no weights", "package", bare)
    for name, options in list(BUILDS.items())[1:]:
        made = job.build(name, options)
        if made is not None:
            job.load(name, "package", made)
    for other in ("clang++", "g++-12", "g++-11", "g++-14"):
        if shutil.which(other):
            made = job.build(other, {}, CXX=other)
            if made is not None:
                job.load(other, "package", made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dry", action="store_true", help="one package, and every way to load it")
    parser.add_argument("--same-process", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.same_process:
        same_process(options.device, options.same_process)
        return
    with tempfile.TemporaryDirectory(prefix="aot_") as folder:
        job = Job(options.seconds, Path(folder), options.device)
        examine(job, options.dry)
        if not options.dry:
            own = [sys.executable, "-X", "faulthandler", str(Path(__file__).resolve()), "--device", options.device]
            job.run("same process", [*own, "--same-process", str(job.folder / "same.pt2")])
    facts_ = {"torch": torch.__version__, "python": sys.version.split()[0], "device": options.device}
    if options.out:
        options.out.write_text(json.dumps({**facts_, "rows": job.rows}, indent=1) + "\n")
    print("\n".join(f"| {row['step']} | {row['result']} |" for row in job.rows if "result" in row))


if __name__ == "__main__":
    main()
