"""Graphs per forward, breaks, recompilations and generate parity of every multimodal family of a zoo.

    python -m benchmarks.surveys.graphs --families PATH/zoo.py [--only NAME ...]

PATH/zoo.py is a module with ``VLM_FAMILIES`` (or ``FAMILIES``): name -> function that gives (model, batch).  Writes
benchmarks/results/graphs.json and docs/results/graphs.md.  Graphs are counted as Dynamo hands them over; what Inductor makes of
them does not change their number, so it is left out unless ``--inductor`` asks for it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import mmqc.backend
from mmqc.backend import collect_records
from mmqc.front.front import attached
from mmqc.graph.tracing import collect_breaks

ROOT = Path(__file__).resolve().parents[2]
BATCHES, NEW_TOKENS = 8, 4


def load(path: Path) -> ModuleType:
    """The module at ``path``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--families {path}: no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def varied(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The batch with 0, 1, 2, ... more text tokens at its end, and every other time its images turned by 90 degrees."""
    length = batch["input_ids"].shape[1]
    for n in range(BATCHES):
        longer = {}
        for name, value in batch.items():
            per_token = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length
            if per_token and not value.is_floating_point() and not name.startswith("decoder"):
                value = torch.cat([value, value[:, -1:].expand(-1, n, *value.shape[2:])], 1)
            longer[name] = value
        grid = longer.get("image_grid_thw")
        if n % 2 and grid is not None:
            longer["image_grid_thw"] = grid[:, [0, 2, 1]]
        yield longer


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Norm-wise, where the reference is finite."""
    keep = torch.isfinite(ref)
    out, ref = out[keep].double(), ref[keep].double()
    return ((out - ref).norm() / ref.norm()).item()


def line(where: str) -> str:
    """A source line without what is in front of its package."""
    return where.split("site-packages/")[-1]


@torch.no_grad()
def measure(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """All columns for one family."""
    started = time.perf_counter()
    torch._dynamo.reset()
    expected = model(**batch, use_cache=False).logits
    compiled = torch.compile(model, backend="mmqc")
    with collect_records() as first, collect_breaks() as breaks:
        error = relative_error(compiled(**batch, use_cache=False).logits, expected)
    compilations = [len(first)]
    for other in list(varied(batch))[1:]:
        with collect_records() as records:
            out = compiled(**other, use_cache=False).logits
        compilations.append(len(records))
        error = max(error, relative_error(out, model(**other, use_cache=False).logits))
    front = attached(model)
    return {
        "graphs": len(first),
        "calls": [r.n_ops for r in first],
        "breaks": Counter(f"{b.reason.split(' Explanation:')[0]} at {line(b.where)}" for b in breaks),
        "compilations": compilations,
        "error": error,
        "generate": generate(model, batch),
        "prepared": [note for note in (front.notes if front else []) if "transformers" not in note],
        "seconds": round(time.perf_counter() - started, 1),
    }


def generate(model: nn.Module, batch: dict[str, Any]) -> str:
    """Whether greedy generation, compiled, gives the tokens of eager mode."""
    more = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    inputs = {k: v for k, v in batch.items() if not k.startswith("decoder")}
    try:
        tokens = model.generate(**inputs, **more)
    except Exception as error:
        return f"eager mode fails: {type(error).__name__}"
    torch._dynamo.reset()
    model.compile(backend="mmqc")
    try:
        with collect_records() as records:
            same = torch.equal(model.generate(**inputs, **more), tokens)
    finally:
        model._compiled_call_impl = None
    return f"{'same' if same else 'DIFFERENT'}, {len(records)} graphs"


def page(rows: dict[str, dict[str, Any]], title: str) -> str:
    """The table in Markdown."""
    one = sum(r.get("graphs") == 1 for r in rows.values())
    lines = [
        "# Graphs per forward",
        "",
        f"Written by `python -m benchmarks.surveys.graphs --families PATH/{title}` with torch {torch.__version__.split('+')[0]} "
        f"and transformers {transformers.__version__}; do not edit. Models are tiny, with random weights, on the CPU in float32; "
        "graphs run as Dynamo made them, without Inductor, which does not change their number (hence errors of zero).",
        "",
        f"**{one} of {len(rows)} multimodal families compile to one graph for the whole forward.**",
        "",
        f"`later compilations`: graphs compiled after the second of {BATCHES} batches, whose texts all differ in length. `error`: "
        f"largest relative difference from eager mode. `generate`: {NEW_TOKENS} greedy tokens against eager mode, and the graphs "
        "compiled for them, prefill and decode together.",
        "",
        "| family | graphs | breaks | later compilations | error | generate |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        if "failed" in r:
            lines.append(f"| {name} | failed: {r['failed']} | | | | |")
            continue
        lines.append(
            f"| {name} | {r['graphs']} | {sum(r['breaks'].values())} | {sum(r['compilations'][2:])} | {r['error']:.0e} | "
            f"{r['generate']} |"
        )
    broken = {name: r["breaks"] for name, r in rows.items() if r.get("breaks")}
    if broken:
        lines += ["", "## Breaks", ""]
        lines += [f"* {name}: {n} x {reason}" for name, breaks in broken.items() for reason, n in breaks.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=Path, required=True, help="module with VLM_FAMILIES or FAMILIES")
    parser.add_argument("--only", nargs="*", help="these families only; nothing is written")
    parser.add_argument("--inductor", action="store_true", help="compile for real")
    args = parser.parse_args()
    if not args.inductor:
        mmqc.backend._lower = lambda gm, inputs, request, record: gm.forward
    zoo = load(args.families)
    families = getattr(zoo, "VLM_FAMILIES", None) or zoo.FAMILIES
    rows: dict[str, dict[str, Any]] = {}
    for name in args.only or families:
        try:
            rows[name] = measure(*families[name]())
        except Exception as error:
            rows[name] = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"}
        print(name, json.dumps(rows[name]), flush=True)
    if not args.only:
        (ROOT / "benchmarks/results").mkdir(exist_ok=True)
        (ROOT / "benchmarks/results/graphs.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        (ROOT / "docs/results").mkdir(exist_ok=True)
        (ROOT / "docs/results/graphs.md").write_text(page(rows, args.families.name), encoding="utf-8")


if __name__ == "__main__":
    main()
