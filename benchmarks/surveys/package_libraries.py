"""Packages and the C++ library they are linked with: one of a linear, built and loaded in fresh processes.

    python -m benchmarks.surveys.package_libraries [--out benchmarks/results/package_libraries.json] [--device cpu|cuda]

compiler   the machine's (``CXX``, or g++), the same told to link its C++ library statically, and one that finds an archive alone
linked     as Inductor does, with "-lstdc++" named, and as ``mmqc.export`` does: with the file that torch's process has loaded
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
import zipfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import command_line

BUILD = """if True:
    import contextlib, sys, torch
    from mmqc.lowering.package import one_cpp_library
    package, device, how = sys.argv[1:]
    model = torch.nn.Linear(8, 8).to(device).eval()
    named = {"aot_inductor.custom_op_libs": ["stdc++"]} if how == "named" else {}
    with torch.no_grad(), one_cpp_library() if how == "one" else contextlib.nullcontext(named) as options:
        program = torch.export.export(model, (torch.ones(2, 8, device=device),))
        torch._inductor.aoti_compile_and_package(program, package_path=package, inductor_configs=options)
"""
LOAD = """if True:
    import sys, torch
    program = torch._inductor.aoti_load_package(sys.argv[1])
    assert program(torch.ones(2, 8, device=sys.argv[2])).isfinite().all()
"""
LINKED = {"plain": "by Inductor", "named": "-lstdc++ named", "one": "by mmqc.export"}


def compilers(folder: Path) -> dict[str, str]:
    """The machine's compiler, and two that differ from it in what they link a shared library with."""
    given = os.environ.get("CXX") or shutil.which("g++") or ""
    archive = Path(subprocess.check_output([given, "-print-file-name=libstdc++.a"], text=True).strip())
    (folder / archive.name).symlink_to(archive.resolve())
    changes = {
        "static C++ library": 'set -- "$@" -static-libstdc++',
        "an archive alone": f'exec {shutil.which("gcc")} -L{folder} "$@" -lstdc++ -lm',
    }
    found = {"as it is": given}
    for name, change in changes.items():
        path = folder / name.replace(" ", "_")
        path.write_text(f'#!/bin/sh\ncase " $* " in *" -shared "*) {change};; esac\nexec {given} "$@"\n')
        path.chmod(0o755)
        found[name] = str(path)
    return found


def outcome(code: str, *arguments: str, **environment: str) -> str:
    """How the process ended."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode < 0:
        return signal.Signals(-done.returncode).name
    said = [line for line in done.stderr.splitlines() if line.startswith(("Error: ", "RuntimeError: "))]
    return "ok" if done.returncode == 0 else (said or done.stderr.splitlines() or ["?"])[0][:120]


def needed(package: Path, folder: Path) -> list[str]:
    """The shared libraries that the package's own asks for."""
    with zipfile.ZipFile(package) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".so"))
        lines = subprocess.check_output(["readelf", "-d", archive.extract(name, folder)], text=True)
    return [line.split("[")[1].rstrip("]") for line in lines.splitlines() if "(NEEDED)" in line]


def rows(device: str, folder: Path) -> list[dict[str, Any]]:
    """Every compiler, linking both ways."""
    found = []
    for compiler, path in compilers(folder).items():
        for how, linked in LINKED.items():
            package = folder / f"{len(found)}.pt2"
            built = outcome(BUILD, str(package), device, how, CXX=path)
            row = {"compiler": compiler, "linked": linked, "built": built}
            if package.exists():
                row |= {"needed": needed(package, folder), "loaded": outcome(LOAD, str(package), device)}
            print(json.dumps(row), flush=True)
            found.append(row)
    return found


def main() -> None:
    """Parse, try, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/package_libraries.json"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    compiler = os.environ.get("CXX") or "g++"
    version = subprocess.check_output([compiler, "--version"], text=True).splitlines()[0]
    with tempfile.TemporaryDirectory(prefix="package_") as folder:
        found = rows(options.device, Path(folder))
    facts = {
        "command": command_line(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiler": version,
        "device": options.device,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**facts, "rows": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
