"""Seconds from the first call of a compiled sample to its result: cold, and with Inductor's cache from an earlier process.

    python -m benchmarks.end_to_end.compile_time [--device cpu] [--repeats 3]

Every figure is a fresh process.  ``inductor`` is ``torch.compile(model)``, ``mmqc`` the same model with ``backend="mmqc"``, ``mmqc,
quantized`` the W8A8 model.  The cold runs of each take turns, so that a busy machine is busy for all of them; the medians
are compared.  Writes benchmarks/results/compile_time.json and docs/results/compile_time.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("inductor", "mmqc", "mmqc, quantized")


def child(way: str, device: str) -> None:
    """Compile and run one way; prints what it took."""
    import mmqc
    from mmqc.samples import load

    sample = load("digits-vqa")
    model = sample.model.eval().to(device)
    batches = [{k: v.to(device) for k, v in batch.items()} for batch in sample.calibration(4)]
    if way == "mmqc, quantized":
        mmqc.quantize_(model, mmqc.recipes.mquant(8, solver="rtn"), batches, progress=False)
    with torch.no_grad():
        expected = model(**batches[0], use_cache=False).logits
        compiled = torch.compile(model, backend="inductor" if way == "inductor" else "mmqc")
        start = time.perf_counter()
        got = compiled(**batches[0], use_cache=False).logits
        seconds = time.perf_counter() - start
        error = float((got - expected).norm() / expected.norm())
        start = time.perf_counter()
        compiled(**batches[1], use_cache=False)
        second = time.perf_counter() - start
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(json.dumps({"seconds": seconds, "another shape": second, "graphs": graphs, "error": error}))


def measured(way: str, device: str, cache: str) -> dict[str, Any]:
    """One fresh process."""
    command = [sys.executable, "-m", "benchmarks.end_to_end.compile_time", "--child", way, "--device", device]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def page(data: dict[str, Any]) -> str:
    """The table."""
    runs, plain = data["runs"], data["medians"]["inductor"]["cold"]
    rows = "\n".join(
        f"| {way} | {runs[way][0]['graphs']} | {m['cold']:.1f} | {m['cold'] / plain:.2f} | {m['warm']:.1f} "
        f"| {m['another shape']:.1f} |"
        for way, m in data["medians"].items()
    )
    return (
        f"# Compile time\n\nWritten by `python -m benchmarks.end_to_end.compile_time --device {data['device']}`; do not edit. "
        f"The whole forward of digits-vqa, from the first call to its result; medians of {data['repeats']} fresh processes. "
        f"{data['machine']}, torch {data['torch']}.\n\n*warm*: another process with the compile cache of the first. *another "
        "shape*: the second batch, in the cold process.\n\n| backend | graphs | cold, s | against Inductor | warm, s | another "
        f"shape, s |\n|---|--:|--:|--:|--:|--:|\n{rows}\n"
    )


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/compile_time.json")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.device)
        return
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as cache:
                run = measured(way, args.device, cache)
                run["warm"] = measured(way, args.device, cache)["seconds"]
            runs[way].append(run)
            print(f"{way}: {run}", flush=True)
    median = lambda way, key: statistics.median(run[key] for run in runs[way])  # noqa: E731
    medians = {
        way: {"cold": median(way, "seconds"), "warm": median(way, "warm"), "another shape": median(way, "another shape")}
        for way in WAYS
    }
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    data = {
        "device": args.device,
        "machine": machine,
        "torch": torch.__version__,
        "repeats": args.repeats,
        "medians": medians,
        "runs": runs,
    }
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (ROOT / "docs/results/compile_time.md").write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main()
