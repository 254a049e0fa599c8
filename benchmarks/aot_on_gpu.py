"""Why a package of one nn.Linear crashes when a fresh process loads it: each hypothesis in a process of its own.

    python benchmarks/aot_on_gpu.py [--out aot.json] [--seconds 270] [--device cpu|cuda] [--workers 8] [--dry]

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
| unlimited stack                       | deep recursion in the loader                                                          |
| nothing, not even ``dlopen``          | static initialisers of the library; the backtrace says which                          |

Builds run side by side, then loads do.  Every failure is printed with its signal, the last Python line (faulthandler), and for the
package itself the C++ frames: by gdb where there is one, and by a preloaded handler that needs none.  What the compiled library
resolves to (readelf, ldd), and which libraries are mapped, is in the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

BUILD_LIMIT, LOAD_LIMIT = 150.0, 60.0  # seconds of one process

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
PACKAGE = START + "    run = torch._inductor.aoti_load_package(package)" + CHECK
LOADS = {
    "package": PACKAGE,
    "package, loader alone": START
    + "    loader = torch._C._aoti.AOTIModelPackageLoader(package, 'model', False, 1, -1)\n"
    + "    run = lambda x: loader.boxed_run([x])"
    + CHECK,
    "metadata alone": START
    + "    print(torch._C._aoti.AOTIModelPackageLoader.load_metadata_from_package(package, 'model'))\n",
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
}
MAPPED = """if True:
    import re, torch
    maps = open('/proc/self/maps').read()
    print(torch.compiled_with_cxx11_abi())
    print('\\n'.join(sorted(set(re.findall(r'/\\S*(?:stdc\\+\\+|gomp|iomp|torch|c10)\\S*\\.so\\S*', maps)))))
"""
MAIN = """
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <cstdio>
int main(int, char** arguments) {
  torch::inductor::AOTIModelPackageLoader loader(arguments[1]);
  std::printf("%zu outputs\\n", loader.run({at::ones({2, 8})}).size());
}
"""
HANDLER = """
#include <execinfo.h>
#include <initializer_list>
#include <signal.h>
#include <unistd.h>
static void show(int number, siginfo_t* info, void*) {
  void* frames[60];
  backtrace_symbols_fd(frames, backtrace(frames, 60), 2);
  _exit(128 + number);
}
__attribute__((constructor)) static void install() {
  void* first[1];
  backtrace(first, 1);  // loads libgcc now, not within the handler
  struct sigaction action = {};
  action.sa_sigaction = show;
  action.sa_flags = SA_SIGINFO;
  for (int number : {SIGSEGV, SIGABRT, SIGBUS, SIGILL}) sigaction(number, &action, nullptr);
}
"""
BUILDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no precompiled header": {"aot_inductor.precompile_headers": False},
    "wrapper -O0": {"aot_inductor.compile_wrapper_opt_level": "O0"},
    "no constants by assembler": {"aot_inductor.use_consts_asm_build": False},
    "no vector instructions": {"cpp.simdlen": 1},
}
COMPILERS = ("clang++", "g++-14", "g++-12", "g++-11")


class Job:
    """Processes under time limits, and what became of them."""

    def __init__(self, seconds: float, folder: Path, device: str, workers: int) -> None:
        self.end, self.folder, self.device, self.workers = time.monotonic() + seconds, folder, device, workers
        self.rows: list[dict[str, Any]] = []

    def together(self, calls: Iterable[Callable[[], Any]]) -> list[Any]:
        """Side by side; their results in order."""
        with ThreadPoolExecutor(self.workers) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def run(self, name: str, command: list[str], limit: float = LOAD_LIMIT, **environment: str) -> bool:
        """One process; whether it ended well."""
        left = min(limit, self.end - time.monotonic())
        if left < 1:
            self.rows.append({"step": name, "result": "not run: out of time"})
            return False
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=self.folder,
            env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=left)
            result = "ok" if process.returncode == 0 else _why(process.returncode)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the compiler, too
            output, result = process.communicate()[0], "timeout"
        tail = "\n".join(output.strip().splitlines()[-40:])
        row = {"step": name, "result": result, "seconds": round(time.monotonic() - started, 1)}
        self.rows.append(row if result == "ok" else {**row, "tail": tail})
        lines = [f"{name:45} {result:12} {row['seconds']:6.1f} s"]
        lines += [] if result == "ok" else ["    " + line for line in tail.splitlines()]
        print("\n".join(lines), flush=True)
        return result == "ok"

    def python(self, name: str, code: str, *arguments: str, limit: float = LOAD_LIMIT, **environment: str) -> bool:
        """One Python process."""
        return self.run(name, [sys.executable, "-X", "faulthandler", "-c", code, *arguments], limit, **environment)

    def build(self, name: str, options: dict[str, Any], weights: bool = True, **environment: str) -> Path | None:
        """A package, compiled in a process and a cache of its own."""
        stem = name.replace(" ", "_").replace(",", "")
        package = self.folder / f"{stem}.pt2"
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"cache_{stem}")}
        arguments = (str(package), self.device, json.dumps(options), "weights" if weights else "none")
        done = self.python(f"build: {name}", BUILD, *arguments, limit=BUILD_LIMIT, **environment)
        return package if done else None

    def load(self, name: str, how: str, package: Path, **environment: str) -> bool:
        """One way to load it."""
        return self.python(f"load: {name}", LOADS[how], str(package), self.device, library(package), **environment)

    def note(self, name: str, command: list[str]) -> None:
        """What a command says."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_LIMIT, cwd=self.folder)
        print(f"--- {name}\n{done.stdout}{done.stderr}", flush=True)
        self.rows.append({"step": name, "output": done.stdout})


def _why(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def library(package: Path) -> str:
    """The compiled library of a package, unpacked beside it."""
    target = package.with_suffix(".so")
    if not target.exists():
        with zipfile.ZipFile(package) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith(".so")]
            target.write_bytes(archive.read(name))
    return str(target)


# --- the steps --------------------------------------------------------------------------------------------------------


def facts(job: Job, package: Path) -> None:
    """What the library needs, where that is found, and what a process has mapped."""
    so, compiler = library(package), os.environ.get("CXX", "g++")
    job.note(
        "versions",
        ["bash", "-c", f"{compiler} --version | head -1; ldd --version | head -1; ld --version | head -1; ulimit -s"],
    )
    job.note(
        "needed", ["bash", "-c", f"readelf -d {so} | grep -E 'NEEDED|RPATH|RUNPATH'; ldd {so} | grep -vE 'linux-vdso'"]
    )
    job.note(
        "symbol versions",
        ["bash", "-c", f"readelf -V {so} | grep -oE '(GLIBCXX|CXXABI|GLIBC)_[0-9.]+' | sort -uV | tail -9"],
    )
    job.note("mapped", [sys.executable, "-c", MAPPED])


def cpp(job: Job) -> Path | None:
    """A loader without Python."""
    source, program, root = job.folder / "main.cpp", job.folder / "main", Path(torch.__file__).parent
    source.write_text(MAIN)
    flags = ["-std=c++20", f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    links = [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    line = [os.environ.get("CXX", "g++"), *flags, str(source), "-o", str(program), *links]
    return program if job.run("build: C++ program", line, BUILD_LIMIT) else None


def same_process(job: Job) -> None:
    """Compile and load in one process."""
    code = BUILD + "    device = sys.argv[2]\n    run = torch._inductor.aoti_load_package(package)" + CHECK
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(job.folder / "cache_same")}
    arguments = (str(job.folder / "same.pt2"), job.device, "{}", "weights")
    job.python("same process", code, *arguments, limit=BUILD_LIMIT, **cache)


def loads(job: Job, package: Path, made: dict[str, Path], program: Path | None) -> list[Callable[[], Any]]:
    """Every way to load."""
    found = subprocess.run(
        ["bash", "-c", "${CXX:-g++} -print-file-name=libstdc++.so.6"], capture_output=True, text=True
    ).stdout.strip()
    elsewhere = job.folder / "elsewhere" if not Path("/dev/shm").is_dir() else Path(tempfile.mkdtemp(dir="/dev/shm"))
    elsewhere.mkdir(exist_ok=True)
    own = [sys.executable, "-X", "faulthandler", "-c", PACKAGE, str(package), job.device]
    calls: list[Callable[[], Any]] = [lambda how=how: job.load(how, how, package) for how in LOADS if how != "package"]
    calls += [
        lambda: job.load("another temporary folder", "package", package, TMPDIR=str(elsewhere)),
        lambda: job.load("system libstdc++ first", "package", package, LD_PRELOAD=found),
        lambda: job.run("load: unlimited stack", ["bash", "-c", 'ulimit -s unlimited; exec "$@"', "bash", *own]),
        lambda: job.load("one thread", "package", package, OMP_NUM_THREADS="1"),
        *(lambda name=name, path=path: job.load(name, "package", path) for name, path in made.items()),
    ]
    if program is not None and job.device == "cpu":
        calls.append(lambda: job.run("load: C++ program", [str(program), str(package)]))
    return calls


def backtraces(job: Job, package: Path) -> None:
    """The C++ frames of the crash."""
    own = [sys.executable, "-c", PACKAGE, str(package), job.device]
    source, handler = job.folder / "handler.cpp", job.folder / "handler.so"
    source.write_text(HANDLER)
    if job.run("build: handler", ["g++", "-shared", "-fPIC", "-O1", str(source), "-o", str(handler)]):
        job.run("frames", ["bash", "-c", '"$@" 2>&1 | c++filt; exit 1', "bash", *own], LD_PRELOAD=str(handler))
    if shutil.which("gdb"):
        line = ["gdb", "-batch", "-ex", "run", "-ex", "bt 30", "-ex", "x/i $pc", "--args", *own]
        job.run("gdb", ["bash", "-c", '"$@"; exit 1', "bash", *line])


def examine(job: Job, dry: bool) -> None:
    """All of it."""
    names = ["plain"] if dry else list(BUILDS)
    builds: dict[str, Callable[[], Any]] = {n: lambda n=n: job.build(n, BUILDS[n]) for n in names}
    builds["C++ program"] = lambda: cpp(job)
    if not dry:
        builds["no weights"] = lambda: job.build("no weights", {}, weights=False)
        builds["same process"] = lambda: same_process(job)
        builds |= {c: lambda c=c: job.build(c, {}, CXX=c) for c in COMPILERS if shutil.which(c)}
    made = dict(zip(builds, job.together(builds.values()), strict=True))
    package, program = made.pop("plain"), made.pop("C++ program")
    made.pop("same process", None)
    if package is None:
        return
    facts(job, package)
    well = job.load("package", "package", package)
    if not well:
        backtraces(job, package)
    job.together(loads(job, package, {n: p for n, p in made.items() if p is not None}, program))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=270, help="for everything")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--dry", action="store_true", help="one package, and every way to load it")
    options = parser.parse_args()
    started = time.monotonic()
    versions = {"torch": torch.__version__, "python": platform.python_version(), "device": options.device}
    with tempfile.TemporaryDirectory(prefix="aot_") as folder:
        job = Job(options.seconds, Path(folder), options.device, options.workers)
        examine(job, options.dry)
    seconds = round(time.monotonic() - started, 1)
    if options.out:
        answer = {**versions, "machine": platform.machine(), "command": " ".join(sys.argv), "seconds": seconds}
        options.out.write_text(json.dumps({**answer, "rows": job.rows}, indent=1) + "\n")
    print("\n".join(f"| {row['step']} | {row['result']} |" for row in job.rows if "result" in row))
    print(f"{seconds} s")


if __name__ == "__main__":
    main()
