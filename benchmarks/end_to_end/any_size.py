"""A model as a service uses it: images of sizes that never came, batches of many sizes, beside bf16 through the same loop.

    python -m benchmarks.end_to_end.any_size [--ways w4a8 mquant-w4a8 bf16] [--rows 1 16 64] [--seconds 290] [--dry] --out any.json

Qwen2-VL-7B's shape with random weights through ``generate`` and ``mmqc.compiled_loop``, on a GPU; ``--dry``: a small model on the
CPU.  Every way is a process.  They compile side by side and then measure one after the other, so that nothing else is on the
device, and ratios are of one run.  A kernel that is compiled while a prompt of an unseen size waits for it is counted.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig

import mmqc
from benchmarks.end_to_end.cold_start import CONFIGS, prompt, small_model
from benchmarks.gpu_run import Run, facts
from benchmarks.rewrites import batch_of, model_of

Grid = tuple[int, int]
WARM: list[Grid] = [(30, 30), (60, 60), (40, 80), (44, 30)]
SMALL: Grid = (20, 20)
MIDDLE: Grid = (60, 60)
LARGE: Grid = (160, 160)
EACH: Grid = (32, 32)  # of the prompts of a batch
DRY: dict[Grid, Grid] = {g: (2 * (1 + g[0] // 40), 2 * (1 + g[1] // 40)) for g in [*WARM, SMALL, MIDDLE, LARGE, EACH]}
FEW, MANY = 72, 136  # new tokens of two calls, of which the difference is the steps between them
UNSEEN, SHOWN = 8, 12


class Way:
    """One model in its process.

    Args:
        name: of ``CONFIGS``, or "bf16".
        dry: a small model, and small images.
    """

    def __init__(self, name: str, dry: bool) -> None:
        torch.manual_seed(0)
        self.dry, self.rows = dry, dict[int, dict[str, Any]]()
        self.model: Any = small_model() if dry else model_of("qwen2_vl_7b", "cuda").eval()
        config = CONFIGS[name]() if name in CONFIGS else None
        if config is not None:
            seen = prompt(self.model, (8, 8)) if dry else batch_of("qwen2_vl_7b", self.model, "cuda")
            mmqc.quantize_(self.model, config, [seen] if config.needs_calibration else None, progress=False)
        self.compiled = 0
        if not dry:
            self.count_kernels()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.held = 0 if dry else torch.cuda.memory_allocated()
        mode = CompileConfig(backend="mmqc", mode="reduce-overhead", fullgraph=False)
        self.how = GenerationConfig(do_sample=False, pad_token_id=0, cache_implementation="static", compile_config=mode)

    def count_kernels(self) -> None:
        """Triton tells of every kernel that it compiles or loads."""
        import triton

        def compiled(**_: Any) -> None:
            self.compiled += 1

        triton.knobs.runtime.jit_post_compile_hook = compiled

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def timed(self, inputs: dict[str, Any], tokens: int) -> float:
        """Seconds of one call."""
        self.wait()
        start = time.perf_counter()
        self.how.max_new_tokens = self.how.min_new_tokens = tokens
        self.model.generate(**inputs, generation_config=self.how, custom_generate=mmqc.compiled_loop)
        self.wait()
        return time.perf_counter() - start

    def best(self, inputs: dict[str, Any], tokens: int, times: int = 3) -> float:
        return min(self.timed(inputs, tokens) for _ in range(times))

    def prompt(self, grid: Grid, rows: int = 1) -> dict[str, Any]:
        one = prompt(self.model, DRY[grid] if self.dry else grid)
        return {name: torch.cat([t] * rows) for name, t in one.items()}

    def busy(self, inputs: dict[str, Any], tokens: int) -> dict[str, float]:
        """Milliseconds of a call on the device, by kernel."""
        activities = [torch.profiler.ProfilerActivity.CPU if self.dry else torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            self.timed(inputs, tokens)
        events = profiler.key_averages()
        return {e.key: (e.self_cpu_time_total if self.dry else e.self_device_time_total) / 1e3 for e in events}

    def compile(self, rows: list[int]) -> dict[str, float]:
        """Seconds of the first calls, in this order."""
        start, found = time.perf_counter(), dict[str, float]()
        for grid in WARM:
            self.timed(self.prompt(grid), 1)
        found["prompts"] = time.perf_counter() - start
        for n in rows:
            self.rows[n], start = self.prompt(EACH, n), time.perf_counter()
            for tokens in (FEW, MANY):
                self.timed(self.rows[n], tokens)
            found[f"batch of {n}"] = time.perf_counter() - start
        return {name: round(seconds, 1) for name, seconds in found.items()}

    def measure(self, seed: int) -> dict[str, Any]:
        """Everything else; the device is this process's own."""
        draw, found = random.Random(seed), dict[str, Any]()
        graphs, kernels, sizes = counters["stats"]["unique_graphs"], self.compiled, dict[str, Any]()
        for _ in range(UNSEEN):
            grid = (2 * draw.randint(8, 60), 2 * draw.randint(8, 60))
            DRY.setdefault(grid, (2 * (grid[0] // 10), 2 * (grid[1] // 10)))
            inputs = self.prompt(grid)
            sizes["x".join(map(str, grid))] = [self.timed(inputs, 1), self.best(inputs, 1)]
        large = self.prompt(LARGE)
        sizes["x".join(map(str, LARGE))] = [self.timed(large, 1), self.best(large, 1)]
        found["unseen sizes: seconds of the first call, and then"] = sizes
        more = {"graphs": counters["stats"]["unique_graphs"] - graphs, "kernels": self.compiled - kernels}
        found["compiled for unseen sizes"] = more
        for name, grid in (("400 patches", SMALL), ("3,600 patches", MIDDLE)):
            inputs = self.prompt(grid)
            clock = 1e3 * self.best(inputs, 1, 6)
            found[f"first token, {name}"] = {"clock_ms": clock, "device_ms": sum(self.busy(inputs, 1).values())}
        for n, inputs in self.rows.items():
            few, many = self.best(inputs, FEW), self.best(inputs, MANY)
            found[f"batch of {n}"] = {"tokens_per_second": n * (MANY - FEW) / (many - few), "first_token_s": self.best(inputs, 1)}
        if self.rows:
            found[f"a step of {max(self.rows)}: ms on the device"] = self.step(self.rows[max(self.rows)])
        if not self.dry:
            found |= {"held_gib": self.held / 2**30, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        return found

    def step(self, inputs: dict[str, Any]) -> dict[str, float]:
        """One decode step by kernel: the mean of those by which two calls differ, the longest kernels first."""
        short, long = self.busy(inputs, FEW), self.busy(inputs, MANY)
        each = {name: (ms - short.get(name, 0.0)) / (MANY - FEW) for name, ms in long.items()}
        order = sorted(each, key=lambda name: -each[name])[:SHOWN]
        return {"all": sum(each.values()), **{name[:100]: each[name] for name in order}}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def child(name: str, args: argparse.Namespace) -> None:
    """Compile, wait for the others, measure in turn."""
    folder = Path(args.child)
    way = Way(name, args.dry)
    seconds = way.compile(args.rows)
    (folder / f"{name}.ready").touch()
    while len(list(folder.glob("*.ready"))) < len(args.ways):
        time.sleep(0.1)
    with (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        found = {"seconds of the first calls, beside the other ways": seconds, **way.measure(args.seed)}
    (folder / f"{name}.json").write_text(json.dumps(rounded(found)), encoding="utf-8")


def measure(args: argparse.Namespace, call: Callable[..., Any] = subprocess.Popen) -> tuple[dict[str, Any], list[str]]:
    """The figures of every way, and which did not come to an end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}
    end, failed = time.monotonic() + args.seconds, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        here = [sys.executable, "-m", "benchmarks.end_to_end.any_size", "--child", folder, "--seed", str(args.seed)]
        here += ["--rows", *map(str, args.rows), *(["--dry"] if args.dry else []), "--ways"]
        started = [(name, call([*here, name, *(w for w in args.ways if w != name)], env=environment)) for name in args.ways]
        for name, process in started:
            try:
                process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
            if process.returncode != 0:
                failed.append(name)
        files = {name: Path(folder, f"{name}.json") for name in args.ways}
        return {name: json.loads(f.read_text(encoding="utf-8")) for name, f in files.items() if f.exists()}, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["w4a8", "mquant-w4a8", "bf16"], choices=[*CONFIGS, "bf16"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--seconds", type=float, default=290.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.ways[0], args)
        return
    found, failed = measure(args)
    text = json.dumps({**facts(Run(args.dry, 0)), "figures": found, "not measured": failed}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(f"no figures of {', '.join(failed)}")


if __name__ == "__main__":
    main()
