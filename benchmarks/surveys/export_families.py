"""Packages of tiny models of many families: what is dynamic, and how far the package is from the model on sizes it never saw.

    python -m benchmarks.surveys.export_families --families FILE.py [--out results.json] [--compile-steps] [--dry] NAME ...

FILE.py defines ``FAMILIES``: by name a function without arguments that returns (model, inputs).  Each family is a process of its
own with a time limit.  ``--dry`` stops before compilation; without ``--compile-steps`` prefill and decode are exported and
compared, and the whole forward alone is compiled.  Rows that ``--out`` has already are kept, those of
the named families are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.aot.programs import Whole
from mmqc.aot.sensitivity import relative_error
from mmqc.aot.variants import taken_apart
from mmqc.export import WHOLE, _Job
from mmqc.lowering.package import load_program
from mmqc.nn.modality import visual_token_ids

ROOT = Path(__file__).resolve().parents[2]

UNSEEN = ((((3, 1), (1, 2)), ((2, 2), (4, 3))), (((6, 2), (1, 3), (2, 2), (3, 3)),))
CHILD = """if True:
    import sys, torch
    cases = torch.load(sys.argv[2])
    run = torch._inductor.aoti_load_package(sys.argv[1])
    torch.save([run(**case) for case in cases], sys.argv[3])
    assert not any(m.split(".")[0] in ("mmqc", "transformers") for m in sys.modules)
"""


def unseen(model: nn.Module, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Batches of sizes that no export was given; those that the model takes."""
    parts = taken_apart(batch, visual_token_ids(model))
    found = []
    for layout in UNSEEN if parts is not None else ():
        layout = layout if parts.images else tuple(() for _ in layout)
        if parts.per_row:
            layout = [((1, 1),) * parts.per_row] * 4
        try:
            case = parts.compose(layout, left=True)
            model(**case)
            found.append(case)
        except Exception as error:
            print("   the model refuses", [len(row) for row in layout], str(error)[:80])
    return found


def family(name: str, build: Any, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    started = time.process_time()
    model, inputs = build()
    model, batch = model.eval(), dict(inputs)
    job = _Job(model, [batch], None, lambda text: print("  ", text, flush=True))
    row: dict[str, Any] = {"family": name}
    with torch.no_grad():
        job.whole()
        row |= dynamic(job.programs[WHOLE], batch)
        try:
            job.steps(["vision", "prefill", "decode"], required=True)
            row["steps"] = [n for n in job.programs if n != WHOLE]
        except Exception as error:
            row["steps_refused"] = str(error).replace("\n", " ")[:400]
            job.split = None
        row["trace_seconds"] = round(time.process_time() - started, 1)
        if not options.dry:
            if not options.compile_steps:
                job.programs, job.split = {WHOLE: job.programs[WHOLE]}, None
            row |= packaged(job, model, [batch, *unseen(model, batch)])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    row["cpu_seconds"] = round(sum(u.ru_utime + u.ru_stime for u in used), 1)
    row["commit"] = _commit()
    row["peak_mib"] = round(max(u.ru_maxrss for u in used) / 1024)
    return row


def dynamic(program: torch.export.ExportedProgram, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Nodes, and the axes of every input that may differ."""
    placeholders = {n.name: n.meta["val"].shape for n in program.graph.find_nodes(op="placeholder")}
    shapes = [placeholders[str(n)] for n in program.graph_signature.user_inputs]
    axes = {
        name: [i for i, size in enumerate(shape) if not isinstance(size, int)] for name, shape in zip(batch, shapes, strict=True)
    }
    return {"nodes": len(program.graph.nodes), "dynamic": axes}


def packaged(job: _Job, model: nn.Module, cases: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Compile, run elsewhere, compare."""
    with tempfile.TemporaryDirectory() as folder:
        package, given, got = (Path(folder) / name for name in ("model.pt2", "given.pt", "got.pt"))
        job.write(package)
        job.compare(package)
        errors, refused = [], []
        for case in cases:
            torch.save([case], given)
            done = subprocess.run([sys.executable, "-c", CHILD, str(package), str(given), str(got)], capture_output=True, text=True)
            if done.returncode:
                refused.append([list(case["input_ids"].shape), done.stderr.strip().splitlines()[-1][:200]])
            else:
                errors.append(relative_error(torch.load(got)[0], Whole(model)(**case)))
        row = {
            "error": max(errors, default=None),
            "cases": len(errors),
            "refused": refused,
            "mib": round(package.stat().st_size / 2**20, 2),
        }
        return row | (stepwise(job, package, cases) if job.split is not None else {})


def stepwise(job: _Job, package: Path, cases: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The error of vision, prefill and decode together, of the prompt and three tokens."""
    assert job.split is not None
    programs = {name: load_program(package, name) for name in job.split.modules()}
    errors, refused = [], []
    for case in (c for c in cases if bool(c["attention_mask"][:, -1].all())):
        try:
            errors.append(job.split.check(programs, case, float("inf")))
        except RuntimeError as error:
            refused.append([list(case["input_ids"].shape), str(error).strip().splitlines()[0][:200]])
    return {"steps_error": max(errors, default=None), "steps_cases": len(errors), "steps_sizes_refused": refused}


def alone(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one family, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "row.json"
        flags = [f for f, on in (("--dry", options.dry), ("--compile-steps", options.compile_steps)) if on]
        line = [
            sys.executable,
            "-m",
            "benchmarks.surveys.export_families",
            "--families",
            str(options.families),
            "--one",
            str(answer),
            *flags,
            name,
        ]
        try:
            done = subprocess.run(line, timeout=options.limit, stderr=subprocess.PIPE, text=True)
        except subprocess.TimeoutExpired:
            return {"family": name, "failed": f"not done after {options.limit:g} s"}
        if answer.exists():
            return json.loads(answer.read_text())
        return {"family": name, "failed": f"exit {done.returncode}: {done.stderr.strip()[-300:]}"}


def _commit() -> str:
    line = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def written(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Results so far."""
    import transformers

    facts = {
        "device": "cpu",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
        "command": f"python -m benchmarks.surveys.export_families --families {options.families.name} "
        + " ".join(f for f, on in (("--dry", options.dry), ("--compile-steps", options.compile_steps)) if on),
    }
    options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--compile-steps", action="store_true")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each family")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    families = runpy.run_path(str(options.families))["FAMILIES"]
    if options.one:
        (name,) = options.names
        try:
            row = family(name, families[name], options)
        except Exception as error:
            row = {"family": name, "failed": f"{type(error).__name__}: {error}".replace("\n", " ")[:600]}
        options.one.write_text(json.dumps(row))
        return
    names = options.names or list(families)
    rows = json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    for name in names:
        print(name, flush=True)
        rows = [*(row for row in rows if row["family"] != name), alone(name, options)]
        print("  ", json.dumps(rows[-1]), flush=True)
        if options.out:
            written(options, rows)


if __name__ == "__main__":
    main()
