"""The tests in one environment after the other: which versions of torch, transformers, torchao and Python does mmqc work with?

    make matrix                                            all of ENVIRONMENTS, built one after the other and deleted behind it
    python -m benchmarks.surveys.versions --only newest    one of them
    python -m benchmarks.surveys.versions --python .venv/bin/python --name "the pins"      an interpreter that has everything
    ... --python PYTHON --name NAME --again                what failed in that row, which the page then says

An environment is a venv with the pins of constraints.txt, but for the versions that it is about; CUDA builds of torch run on the
CPU, and are some gigabytes each. The tests are those of ``BORDER``; `--all` takes all of `make test`, `--tests PATH ...` others,
and the table says which. pythonX.Y has to be found for every X.Y in ENVIRONMENTS.

Writes benchmarks/results/versions.json, an entry an environment, and the page docs/results/versions.md.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks/results/versions.json", ROOT / "docs/results/versions.md"
WHERE = ROOT / "out/matrix"
PACKAGES = ("torch", "transformers", "torchao", "triton", "numpy")
ASK = """import json, sys
from importlib.metadata import version
print(json.dumps([sys.version.split()[0], {package: version(package) for package in sys.argv[1:]}]))"""
# What touches private names and formats of other packages: one test file or test for each, as cheap as it can be.
BORDER = {
    "names that moved": ("tests/test_versions.py",),
    "transformers' caches and masks, `generate` compiled": (
        "tests/kv_tests/test_layer_types.py",
        "tests/compiler_tests/test_step_mask.py",
        "tests/compiler_tests/test_step_inputs.py",
        "tests/compiler_tests/test_step_replay.py",
        "tests/compiler_tests/test_kept_cache.py",
        "tests/families/test_loop.py",
    ),
    "transformers' plans for ranks": (
        "tests/checkpoint_tests/parallel/test_hf_parallel.py",
        "tests/distributed_tests/test_many_ranks.py",
    ),
    "transformers' outputs, decoders and hooks": ("tests/nn_tests/test_inside.py",),
    "transformers' quantizers: saved, loaded, registered": ("tests/checkpoint_tests/test_hf.py",),
    "compressed-tensors' checkpoints": ("tests/checkpoint_tests/test_read_compressed_tensors.py",),
    "peft": (
        "tests/adapters_tests/test_peft_layers.py::test_all_linear__is_every_linear_but_the_head",
        "tests/adapters_tests/test_peft_layers.py::test_adapter__is_saved_and_loaded_again",
        "tests/adapters_tests/test_peft_layers.py::test_trainer__ten_steps",
    ),
    "Dynamo: the backend, with and without rotations": (
        "tests/test_backend.py::test_backend__compiled_equals_eager",
        "tests/test_backend.py::test_discovery__found_by_name_without_importing_dynamo",
        "tests/front_tests/test_front.py::test_front__backend_quantizes_in_one_graph_without_rotations",
        "tests/families/test_audio.py",
    ),
    "Inductor": (
        "tests/lowering_tests/test_inductor.py",
        "tests/lowering_tests/test_cpp_descriptors.py",
        "tests/lowering_tests/test_early_cpp.py",
        "tests/lowering_tests/test_small_constants.py",
        "tests/lowering_tests/test_lowering.py::test_lowerings__dynamic_rows_compile_once",
    ),
    "AOTInductor: a model exported and run": ("tests/aot_tests/test_exportable.py::test_export__sample_on_other_shapes",),
    "transformers' server": ("tests/cli_tests/serving/test_peer.py", "tests/cli_tests/serving/test_server.py"),
    "the command line": ("tests/cli_tests/test_doctor.py", "tests/cli_tests/test_failures.py"),
}
INTRODUCTION = """# Versions

Every row is an environment in which tests that need no GPU were run (`make matrix`; of CUDA builds of torch too, on the CPU): where
it says "border", those of what touches other packages, listed below; `make matrix MATRIX_ARGS=--all` takes all. The bounds in
`pyproject.toml` are the first and the last versions of this table. A private name of another package that a version keeps elsewhere
is refused by name (`mmqc.versions.MovedError`); `mmqc doctor` says whether what is installed is in these bounds. A test that failed
and was mended, or that a busy machine failed, is run again alone: the last column then has both commits.
The border grows: a row of fewer tests is of what was listed at its commit.
"""


@dataclass(frozen=True)
class Environment:
    """What differs from the pins."""

    name: str
    torch: str
    transformers: str
    torchao: str
    python: str = "3.11"
    pins: tuple[str, ...] = ()


ENVIRONMENTS = (
    Environment("oldest", "2.11.0", "5.17.0", "0.17.0", pins=("numpy==2.3.5", "setuptools==80.10.2", "triton==3.6.0")),
    Environment("torch 2.12", "2.12.1", "5.18.0", "0.17.0", pins=("setuptools==80.10.2",)),
    Environment("the pins", "2.13.0", "5.17.0", "0.18.0"),
    Environment("transformers 5.19", "2.13.0", "5.19.0", "0.17.0"),
    Environment("Python 3.12", "2.13.0", "5.20.2", "0.18.0", python="3.12"),
    Environment("torch 2.14", "2.14.1", "5.21.1", "0.18.0"),
    Environment("Python 3.13", "2.13.0", "5.22.2", "0.18.0", python="3.13"),
    Environment("transformers 5.23", "2.14.1", "5.23.0", "0.18.0", python="3.12"),
    Environment("newest", "2.15.0", "5.24.0", "0.18.0", python="3.13"),
)


def main() -> None:
    """Build, test, write."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--only", nargs="*", choices=[e.name for e in ENVIRONMENTS], help="names of environments")
    arguments.add_argument("--python", type=Path, help="an interpreter that has everything, and no environment to build")
    arguments.add_argument("--name", help="of that interpreter's row")
    arguments.add_argument("--tests", nargs="*", help="paths; those of BORDER by default")
    arguments.add_argument("--all", dest="tests", action="store_const", const=[], help="all tests")
    arguments.add_argument("--again", action="store_true", help="the failed tests of the row alone, once they are mended")
    arguments.add_argument("--jobs", default="auto")
    arguments.add_argument("--keep", action="store_true", help="keep the environments")
    arguments.add_argument("--page", action="store_true", help="write the page alone")
    options = arguments.parse_args()
    if options.page:
        write(read())
    elif options.again:
        add(again(next(row for row in read() if row["name"] == options.name), options))
    elif options.python:
        add(tested(options.name or str(options.python), options.python, options))
    else:
        several(options)


def several(options: argparse.Namespace) -> None:
    """Build, test and delete each environment."""
    for environment in ENVIRONMENTS:
        if options.only and environment.name not in options.only:
            continue
        folder = WHERE / re.sub(r"\W+", "-", environment.name)
        try:
            add(tested(environment.name, build(environment, folder), options))
        except subprocess.CalledProcessError as error:
            add({"name": environment.name, "failed_to_build": (error.stderr or str(error)).strip().splitlines()[-1]})
        finally:
            if not options.keep:
                shutil.rmtree(folder, ignore_errors=True)


def build(environment: Environment, folder: Path) -> Path:
    """The interpreter of a new venv with these versions."""
    own = [
        f"torch=={environment.torch}",
        f"transformers=={environment.transformers}",
        f"torchao=={environment.torchao}",
        *environment.pins,
    ]
    taken = {pin.partition("==")[0] for pin in own} | {"triton"}
    pins = [
        line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
    ]
    run(f"python{environment.python}", "-m", "venv", "--clear", str(folder))
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([*own, *(p for p in pins if p.partition("==")[0] not in taken)]) + "\n", encoding="utf-8")
    python = folder / "bin/python"
    for what in (["setuptools"], ["--no-deps", "torch"], ["--no-build-isolation", "-e", ".[dev,demo,report,serve]"]):
        run(str(python), "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", "-c", str(constraints), *what)
    return python


def run(*command: str) -> None:
    """Raise with what it said on stderr."""
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


def tested(name: str, python: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The row of an interpreter."""
    asked = subprocess.run([str(python), "-c", ASK, *PACKAGES], check=True, capture_output=True, text=True, cwd=ROOT)
    version, packages = json.loads(asked.stdout)
    report = WHERE / f"{os.getpid()}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    parallel = [] if options.jobs == "0" else ["-n", options.jobs, "--dist", "worksteal"]
    marks = ["-m", "not gpu and not slow", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    border = [path for paths in BORDER.values() for path in paths]
    chosen = border if options.tests is None else options.tests
    subprocess.run([str(python), "-m", "pytest", *marks, *parallel, *chosen], cwd=ROOT, env=environment, check=False)
    what = "border" if options.tests is None else options.tests or "all"
    row = {"name": name, "python": version, **packages, "tests": what, **counted(report)}
    report.unlink()
    return row | {"seconds": round(time.perf_counter() - start), "commit": commit(), "date": time.strftime("%Y-%m-%d")}


def again(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """A row whose failed tests were run once more."""
    names = [name.partition("::") for name in row["failures"]]
    options.tests = [f"{module.replace('.', '/')}.py::{test}" for module, _, test in names]
    new = tested(row["name"], options.python, options)
    return merged(row, new)


def merged(row: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A row, and another of what had failed in it."""
    passed = row["passed"] + new["passed"]
    mended = [*row.get("again", []), {name: new[name] for name in ("passed", "commit", "date")}]
    return row | {"passed": passed, "failed": new["failed"], "failures": new["failures"], "again": mended}


def counted(report: Path) -> dict[str, Any]:
    """Numbers of a JUnit report, the names of what failed, and the reasons of what was skipped."""
    failed, skipped, count = [], collections.Counter[str](), 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        count += 1
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname', '')}::{case.get('name', '')}")
        elif (skip := case.find("skipped")) is not None:
            skipped[skip.get("message", "")] += 1
    passed = count - len(failed) - sum(skipped.values())
    return {"passed": passed, "failed": len(failed), "skipped": sum(skipped.values()), "failures": failed, "reasons": dict(skipped)}


def commit() -> str:
    """The short hash of what was tested."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def read() -> list[dict[str, Any]]:
    """The rows so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["environments"] if RESULTS.exists() else []


def add(row: dict[str, Any]) -> None:
    """Write a row in the place of the one of its name."""
    rows = read()
    names = [old["name"] for old in rows]
    if row["name"] in names:
        rows[names.index(row["name"])] = row
    else:
        rows.append(row)
    write(rows)
    print(json.dumps({name: value for name, value in row.items() if name not in ("reasons",)}, indent=1), flush=True)


def write(rows: list[dict[str, Any]]) -> None:
    """The JSON and the page."""
    found = {"command": "make matrix", "environments": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")


def page(rows: list[dict[str, Any]]) -> str:
    """docs/results/versions.md."""
    lines = ["| | Python | torch | transformers | torchao | tests | passed | failed | skipped | commit |", "|" + "---|" * 10]
    details: list[str] = []
    for row in rows:
        if "failed_to_build" in row:
            lines.append(f"| {row['name']} | | | | | not built: {row['failed_to_build']} | | | | |")
            continue
        tests = row["tests"] if isinstance(row["tests"], str) else ", ".join(f"`{path}`" for path in row["tests"])
        versions = f"{row['python']} | {row['torch']} | {row['transformers']} | {row['torchao']}"
        counts = f"{row['passed']:,} | {row['failed']} | {row['skipped']}"
        commits = [row["commit"], *(f"{new['passed']} of them {new['commit']}" for new in row.get("again", ()))]
        lines.append(f"| {row['name']} | {versions} | {tests} | {counts} | {', '.join(commits)} |")
        details += [f"* {row['name']}: fails `{name}`" for name in row["failures"]]
        details += [f"* {row['name']}: {count} skipped: {reason}" for reason, count in sorted(row["reasons"].items())]
    border = [f"* {what}: {', '.join(f'`{path}`' for path in paths)}" for what, paths in BORDER.items()]
    more = ["", "## The border", "", *border, "", "## What failed, and why tests were skipped", "", *(details or ["Nothing."])]
    return "\n".join([INTRODUCTION, *lines, *more]) + "\n"


if __name__ == "__main__":
    main()
