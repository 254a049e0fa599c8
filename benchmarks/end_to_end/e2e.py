"""Decode and time to first token of a Qwen2-VL-7B-shaped model with random weights, end to end through ``generate``.

    python -m benchmarks.end_to_end.e2e --out benchmarks/results/e2e.json [--ways "bf16" "w4a8 loop" ...]

Batch 1, one image of 840 x 840 pixels and 17 text tokens: 917 tokens of context, a static cache.  Decode speed is
(n2 - n1) / (t(n2) - t(n1)) for two lengths, so that prefill drops out; the first token is ``generate`` of one.  "loop" is
``mmqc.compiled_loop`` with CUDA graphs for the prompt too, the rest transformers' own loop.  Each way is a process: they
compile side by side and are timed in turn.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.rewrites import batch_of, model_of

GRID, TEXT, IMAGE = (1, 60, 60), 17, 151655
FEW, MANY = 16, 144
MODELS = ("bf16", "w4a16", "w8a8", "w4a8", "mquant-w4a8", "w8a8-fp8", "w4a8-fp8")
WAYS = [f"{model}{loop}" for model in MODELS for loop in ("", " loop")]
DEFAULT = ["bf16", "bf16 loop", "w4a16 loop", "w4a8 loop", "mquant-w4a8 loop"]


def batch(model: Any) -> dict[str, torch.Tensor]:
    """One image, then text."""
    tokens = GRID[1] * GRID[2] // 4
    ids = torch.cat((torch.full((tokens,), IMAGE), torch.arange(1000, 1000 + TEXT)))[None].cuda()
    vision = model.config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(GRID[1] * GRID[2], width, device="cuda", dtype=torch.bfloat16)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([GRID]).cuda(),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def quantize(model: Any, name: str) -> None:
    """In place; the head gets 8 bits.  A small image calibrates: the weights are random anyway."""
    import mmqc

    recipes = mmqc.recipes
    config = {
        "w4a16": lambda: recipes.rtn(4, group_size=128, head_bits=8),
        "w8a8": lambda: recipes.rtn(8, 8, head_bits=8),
        "w4a8": lambda: recipes.rtn(4, 8, head_bits=8),
        "w8a8-fp8": lambda: recipes.rtn(8, 8, head_bits=8).with_float8(),
        "w4a8-fp8": lambda: recipes.rtn(4, 8, head_bits=8).with_float8(),
        "mquant-w4a8": lambda: recipes.mquant(4, solver="rtn", head_bits=8),
    }[name]()
    batches = [batch_of("qwen2_vl_7b", model, "cuda")] if config.needs_calibration else None
    mmqc.quantize_(model, config, batches, progress=False)
    torch.cuda.empty_cache()  # for the other ways beside this one


def child(way: str, trace: Path | None) -> None:
    """Build, quantize, generate; waits for a line on stdin before it measures, then prints the figures."""
    import mmqc

    name, _, loop = way.partition(" ")
    torch.manual_seed(0)
    model: Any = model_of("qwen2_vl_7b", "cuda").eval()
    inputs = batch(model)
    start = time.perf_counter()
    if name != "bf16":
        quantize(model, name)
    quantized = time.perf_counter() - start
    print(f"{way}: quantized in {quantized:.0f} s", file=sys.stderr, flush=True)
    from transformers import CompileConfig, GenerationConfig

    backend = "inductor" if name == "bf16" else "mmqc"
    # A config of its own: without one, transformers builds the model's config anew in every call.
    config = GenerationConfig(
        do_sample=False,
        cache_implementation="static",
        pad_token_id=0,
        compile_config=CompileConfig(backend=backend, mode="reduce-overhead", fullgraph=False),
    )
    more: dict[str, Any] = {"custom_generate": mmqc.compiled_loop, "prefill": "graphs"} if loop else {}

    def timed(n: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        config.max_new_tokens = config.min_new_tokens = n
        model.generate(**inputs, generation_config=config, **more)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    start = time.perf_counter()
    timed(MANY)
    cold = time.perf_counter() - start
    print(f"{way}: compiled in {cold:.0f} s", file=sys.stderr, flush=True)
    print("ready", flush=True)
    sys.stdin.readline()
    timed(MANY)
    few, many, first = (min(timed(n) for _ in range(3)) for n in (FEW, MANY, 1))
    data = {
        "tokens_per_second": (MANY - FEW) / (many - few),
        "first_token_seconds": first,
        "cold_seconds": cold,
        "quantize_seconds": quantized,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    print(json.dumps(data), flush=True)
    if trace is not None:
        profile(timed, trace, way)


def profile(timed: Any, trace: Path, way: str) -> None:
    """Device time by kernel, of the first token alone and of sixteen more; where the device waits; Python's own time."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    found: dict[Any, Any] = {"waits": waits(timed)}
    for n in (1, 17):
        with torch.profiler.profile(activities=kinds) as profiler:
            timed(n)
        events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
        found[n] = {e.key[:120]: [round(e.self_device_time_total), e.count] for e in events if e.self_device_time_total}
    profiler = cProfile.Profile()
    for _ in range(5):
        profiler.runcall(timed, 1)
    with (trace / f"host_{way.replace(' ', '_')}.txt").open("w", encoding="utf-8") as text:
        pstats.Stats(profiler, stream=text).sort_stats("cumtime").print_stats(120)
    (trace / f"profile_{way.replace(' ', '_')}.json").write_text(json.dumps(found, indent=0), encoding="utf-8")


def waits(timed: Any, longest: int = 20) -> dict[str, Any]:
    """Milliseconds of one first token: until its first kernel, in kernels, after the last; the longest waits in between."""
    with torch.profiler.profile() as profiler, torch.profiler.record_function("first token"):
        timed(1)
    all_events = profiler.events() or []
    call = next(e for e in all_events if e.name == "first token").time_range
    on_device = [e for e in all_events if e.device_type == torch.autograd.DeviceType.CUDA and e.name != "first token"]
    on_device.sort(key=lambda e: e.time_range.start)
    end, busy, found = call.start, 0.0, []
    for e in on_device:
        found.append(((e.time_range.start - end) / 1e3, (end - call.start) / 1e3, e.name[:80]))
        busy += max(0.0, e.time_range.end - max(end, e.time_range.start))
        end = max(end, e.time_range.end)
    found.append(((call.end - end) / 1e3, (end - call.start) / 1e3, "the end"))
    found.sort(reverse=True)
    return {"call": (call.end - call.start) / 1e3, "busy": busy / 1e3, "wait, at, before": found[:longest]}


class Child:
    """One way in a process of its own, with its log."""

    def __init__(self, way: str, trace: Path | None) -> None:
        self.way = way
        log = trace / f"log_{way.replace(' ', '_')}.txt" if trace else Path(tempfile.mkdtemp()) / "log.txt"
        self.log = log.open("w+", encoding="utf-8")
        # Several processes that all take all cores wait for each other: threads that spin make that twenty times slower.
        environment = {**os.environ, "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "benchmarks.end_to_end.e2e", "--child", way, *(["--trace", str(trace)] if trace else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )

    def line(self) -> str:
        """The next line that it prints; nothing when it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def figures(self) -> dict[str, Any]:
        """Let it measure, and wait until it is gone."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        found = self.line()
        self.process.wait()
        if found:
            return json.loads(found)
        self.log.seek(0)
        return {"failed": self.log.read()[-1500:]}


def main() -> None:
    """Parse, compile all ways, measure each in turn, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/e2e.json"))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=DEFAULT)
    parser.add_argument("--seconds", type=int, default=420, help="time limit for all of it")
    parser.add_argument("--trace", type=Path, help="a folder for device times by kernel")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.trace)
        return
    children = [Child(way, args.trace) for way in args.ways]
    deadline = threading.Timer(args.seconds, lambda: [c.process.kill() for c in children])
    deadline.start()
    with ThreadPoolExecutor(len(children)) as pool:
        list(pool.map(Child.line, children))  # all have compiled, or failed
    rows: dict[str, Any] = {}
    for c in children:
        rows[c.way] = c.figures()
        print(c.way, rows[c.way], flush=True)
        data = {
            "command": "python -m benchmarks.end_to_end.e2e",
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "context": GRID[1] * GRID[2] // 4 + TEXT,
            "ways": rows,
        }
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    deadline.cancel()


if __name__ == "__main__":
    main()
