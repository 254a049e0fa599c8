"""By the clock and on the device: prompts of several sizes and a step, with launches, kernels and a profile of the host.

    python -m benchmarks.end_to_end.host_cost [--layers 4] [--profile] [--prefill compiled recorded] [--dry] --out results.json

Qwen2-VL-7B's shape with random weights in W4A8, or another of cold_start's configs, through ``generate`` and
``mmqc.compiled_loop``, on a GPU; ``--layers``: so many layers and so many blocks of the tower, which leaves what does not grow
with depth; ``--dry``: cold_start's small model, on the CPU; several ways of a prompt are measured on one model, and their tokens
compared.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import CompileConfig, GenerationConfig, Qwen2VLConfig

import mmqc
from benchmarks.end_to_end.cold_start import CONFIGS, prompt, small_model
from benchmarks.gpu_run import Run, facts
from benchmarks.host_profile import slowest
from benchmarks.rewrites import batch_of, model_of

GRIDS = {"400 patches": (20, 20), "3,600 patches": (60, 60), "25,600 patches": (160, 160)}
Kernels = dict[str, tuple[float, int]]  # microseconds and launches by name


def shallow(layers: int) -> None:
    """From now on configs have so many layers and blocks."""
    made = Qwen2VLConfig.__init__

    def with_layers(self: Any, *args: Any, **given: Any) -> None:
        given["text_config"]["num_hidden_layers"] = given["vision_config"]["depth"] = layers
        made(self, *args, **given)

    setattr(Qwen2VLConfig, "__init__", with_layers)  # noqa: B010


class Calls:
    """Calls of one model."""

    def __init__(self, model: Any, prefill: str) -> None:
        self.more = {"custom_generate": mmqc.compiled_loop, "prefill": prefill}
        self.model, self.wait = model, torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
        compiled = CompileConfig(backend="mmqc", mode="reduce-overhead", fullgraph=False)
        self.config = GenerationConfig(do_sample=False, pad_token_id=0, cache_implementation="static", compile_config=compiled)

    def tokens(self, inputs: dict[str, torch.Tensor], new: int) -> list[int]:
        """Greedy ones."""
        self.config.max_new_tokens = self.config.min_new_tokens = new
        return self.model.generate(**inputs, generation_config=self.config, **self.more)[0, -new:].tolist()

    def seconds(self, inputs: dict[str, torch.Tensor], new: int = 1) -> float:
        """Of one call of ``generate``."""
        self.wait()
        start = time.perf_counter()
        self.config.max_new_tokens = self.config.min_new_tokens = new
        self.model.generate(**inputs, generation_config=self.config, **self.more)
        self.wait()
        return time.perf_counter() - start

    def kernels(self, inputs: dict[str, torch.Tensor], new: int = 1) -> Kernels:
        """What ran on the device."""
        on_cpu = self.model.device.type == "cpu"
        with profile(activities=[ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA]) as run:
            self.seconds(inputs, new)
        times = {e.key: (e.self_cpu_time_total if on_cpu else e.self_device_time_total, e.count) for e in run.key_averages()}
        return {name: found for name, found in times.items() if found[0]}

    def host(self, work: Callable[[], object]) -> list[str]:
        """The functions that took most of the host's time."""
        watch = cProfile.Profile()
        watch.runcall(work)
        return slowest(watch)


def summary(found: Kernels) -> dict[str, Any]:
    """Milliseconds, launches, and the kernels that take longest."""
    first = sorted(found.items(), key=lambda item: -item[1][0])[:20]
    return {
        "device_ms": round(sum(us for us, _ in found.values()) / 1e3, 3),
        "launches": sum(count for _, count in found.values()),
        "kernels": {name[:100]: [round(us, 1), count] for name, (us, count) in first},
    }


def step(calls: Calls, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of one token: what is left of many behind a prompt without a few."""
    first = calls.seconds(given, 8)
    few, many = (min(calls.seconds(given, n) for _ in range(3)) for n in (16, 144))
    before, behind = calls.kernels(given, 4), calls.kernels(given, 68)
    each = {k: ((us - before.get(k, (0, 0))[0]) / 64, (n - before.get(k, (0, 0))[1]) // 64) for k, (us, n) in behind.items()}
    return {"first_s": round(first, 2), "clock_ms": round(1e3 * (many - few) / 128, 3), **summary(each)}


def measure(model: Any, grids: dict[str, tuple[int, int]], prefill: str, watched: bool) -> dict[str, Any]:
    """Every figure; the prompts come first, so that a step finds the cache of the largest."""
    calls, figures = Calls(model, prefill), dict[str, Any]()
    torch.manual_seed(0)  # every way is asked the same
    inputs = {name: prompt(model, grid) for name, grid in grids.items()}
    for name, given in inputs.items():
        figures[name] = {"first_s": round(calls.seconds(given), 2)}
    for name, given in inputs.items():
        figures[name] |= {"clock_ms": round(1e3 * min(calls.seconds(given) for _ in range(5)), 2), **summary(calls.kernels(given))}
    given = list(inputs.values())[1]
    figures["step"] = step(calls, given)
    figures["tokens"] = {name: calls.tokens(given, 12) for name, given in reversed(inputs.items())}
    if watched:
        figures["host of a prompt"] = calls.host(lambda: calls.seconds(next(iter(inputs.values()))))
        figures["host of 100 steps"] = calls.host(lambda: calls.seconds(given, 101))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--config", default="w4a8", choices=CONFIGS)
    parser.add_argument("--prefill", nargs="+", default=["compiled"], help="compiled_loop's, one after the other")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.layers:
        shallow(args.layers)
    model = small_model() if args.dry else model_of("qwen2_vl_7b", "cuda").eval()
    batch = prompt(model, (8, 8)) if args.dry else batch_of("qwen2_vl_7b", model, "cuda")
    mmqc.quantize_(model, CONFIGS[args.config](), [batch], progress=False)
    grids = {name: (4 + 2 * i, 4) for i, name in enumerate(GRIDS)} if args.dry else GRIDS
    ways = {prefill: measure(model, grids, prefill, args.profile) for prefill in args.prefill}
    found = {**facts(Run(args.dry, 0)), "config": args.config, "figures": ways}
    found["same tokens"] = len({str(way["tokens"]) for way in ways.values()}) == 1
    text = json.dumps(found, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
