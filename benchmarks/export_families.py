"""Packages of tiny models of many families: what is dynamic, and how far the package is from the model on sizes it never saw.

    python benchmarks/export_families.py --families FILE.py [--out results.json] [--compile-steps] [--dry] NAME ...

FILE.py defines ``FAMILIES``: by name a function without arguments that returns (model, inputs).  ``--dry`` stops before
compilation; without ``--compile-steps`` prefill and decode are exported and compared, and the whole forward alone is compiled.
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import mmqc  # noqa: E402
from mmqc.export import WHOLE, _Job  # noqa: E402
from mmqc.front.exportable import relative_error  # noqa: E402
from mmqc.front.programs import Whole  # noqa: E402
from mmqc.front.variants import taken_apart  # noqa: E402
from mmqc.quantize import visual_token_ids  # noqa: E402

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
        program = job.programs[WHOLE]
        placeholders = {n.name: n.meta["val"].shape for n in program.graph.find_nodes(op="placeholder")}
        axes = [placeholders[str(n)] for n in program.graph_signature.user_inputs]
        row["dynamic"] = {
            name: [i for i, size in enumerate(shape) if not isinstance(size, int)]
            for name, shape in zip(batch, axes, strict=True)
        }
        row["nodes"] = len(program.graph.nodes)
        try:
            job.steps(["vision", "prefill", "decode"], required=True)
            row["steps"] = [n for n in job.programs if n != WHOLE]
        except Exception as error:
            row["steps"] = str(error).replace("\n", " ")[:300]
        row["trace_seconds"] = round(time.process_time() - started, 1)
        if not options.dry:
            if not options.compile_steps:
                job.programs, job.split = {WHOLE: program}, None
            row |= packaged(job, model, [batch, *unseen(model, batch)])
    return row


def packaged(job: _Job, model: nn.Module, cases: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Compile, run elsewhere, compare."""
    with tempfile.TemporaryDirectory() as folder:
        package, given, got = (Path(folder) / name for name in ("model.pt2", "given.pt", "got.pt"))
        job.write(package)
        job.compare(package)
        errors, refused = [], []
        for case in cases:
            torch.save([case], given)
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(package), str(given), str(got)], capture_output=True, text=True
            )
            sizes = list(case["input_ids"].shape) if "input_ids" in case else []
            if done.returncode:
                refused.append([sizes, done.stderr.strip().splitlines()[-1][:200]])
            else:
                errors.append(relative_error(torch.load(got)[0], Whole(model)(**case)))
        return {"error": max(errors, default=None), "cases": len(errors), "refused": refused,
                "mib": round(package.stat().st_size / 2**20, 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--compile-steps", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    families = runpy.run_path(str(options.families))["FAMILIES"]
    rows = []
    for name in options.names or list(families):
        print(name, flush=True)
        try:
            rows.append(family(name, families[name], options))
        except Exception as error:
            rows.append({"family": name, "failed": f"{type(error).__name__}: {error}".replace("\n", " ")[:400]})
        print("  ", json.dumps(rows[-1]), flush=True)
        if options.out:
            facts = {"torch": torch.__version__, "mmqc": mmqc.__version__, "machine": platform.machine()}
            options.out.write_text(json.dumps({**facts, "command": " ".join(sys.argv), "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(f"| {row['family']} | {row.get('error', row.get('failed'))} | {row.get('steps')} |")


if __name__ == "__main__":
    main()
