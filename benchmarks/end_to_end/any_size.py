"""A model as a service uses it: images of sizes that never came, batches of many sizes, beside bf16 through the same loop.

    python -m benchmarks.end_to_end.any_size [--ways w4a8 mquant-w4a8 bf16] [--rows 1 16 64] [--seconds 480] [--dry] --out any.json

Qwen2-VL-7B's shape with random weights through ``generate`` and ``mmqc.compiled_loop``, on a GPU; ``--dry``: a small model on the
CPU.  Every way is a process.  They compile side by side and then measure one after the other, so that nothing else is on the
device, and ratios are of one run.  A kernel that is compiled while a prompt of an unseen size waits for it is counted.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.utils import counters

import mmqc
from benchmarks.end_to_end import side_by_side
from benchmarks.end_to_end.cold_start import CONFIGS, prompt, small_model
from benchmarks.end_to_end.host_cost import GRIDS, Calls, Kernels, step, summary
from benchmarks.rewrites import batch_of, model_of

Grid = tuple[int, int]
WARM: list[Grid] = [(30, 30), (60, 60), (40, 80), (44, 30)]
EACH: Grid = (32, 32)  # of the prompts of a batch
FEW, MANY = 72, 200  # new tokens of two calls, of which the difference is the steps between them
UNSEEN = 8
PRODUCTS = re.compile("(scaled|gated|packed)_(matmul|matmul_descriptor|pingpong|scaled|gated)_kernel")  # of codes, not the head's


class Way:
    """One model in its process.

    Args:
        name: of ``CONFIGS``, or "bf16".
        dry: a small model, and small images.
    """

    def __init__(self, name: str, dry: bool) -> None:
        torch.manual_seed(0)
        self.dry, self.rows = dry, dict[int, dict[str, torch.Tensor]]()
        model: Any = small_model() if dry else model_of("qwen2_vl_7b", "cuda").eval()
        config = CONFIGS[name]() if name in CONFIGS else None
        if config is not None:
            seen = prompt(model, (8, 8)) if dry else batch_of("qwen2_vl_7b", model, "cuda")
            mmqc.quantize_(model, config, [seen] if config.needs_calibration else None, progress=False)
        self.compiled = 0
        if not dry:
            self.count_kernels()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.held = 0 if dry else torch.cuda.memory_allocated()
        self.calls = Calls(model, "recorded")

    def count_kernels(self) -> None:
        """Triton tells of every kernel that it compiles or loads."""
        import triton

        def compiled(**_: Any) -> None:
            self.compiled += 1

        triton.knobs.runtime.jit_post_compile_hook = compiled

    def best(self, inputs: dict[str, torch.Tensor], tokens: int = 1, times: int = 3) -> float:
        """Seconds of the fastest call."""
        return min(self.calls.seconds(inputs, tokens) for _ in range(times))

    def step(self, inputs: dict[str, torch.Tensor]) -> float:
        """Seconds of a step: long and short calls by turns, once the prompt is recorded, which happens when it came a few times."""
        self.best(inputs, FEW)
        pairs = [(self.calls.seconds(inputs, FEW), self.calls.seconds(inputs, MANY)) for _ in range(5)]
        few, many = map(min, zip(*pairs, strict=True))
        return (many - few) / (MANY - FEW)

    def prompt(self, grid: Grid, rows: int = 1) -> dict[str, torch.Tensor]:
        """So many prompts with an image each."""
        h, w = (2 * (1 + n // 20) for n in grid) if self.dry else grid
        return {name: torch.cat([t] * rows) for name, t in prompt(self.calls.model, (h, w)).items()}

    def compile(self, rows: list[int]) -> dict[str, float]:
        """Seconds of the first calls, in this order."""
        start, found = time.perf_counter(), dict[str, float]()
        for grid in WARM:
            self.calls.seconds(self.prompt(grid))
        found["prompts"] = time.perf_counter() - start
        for n in rows:
            self.rows[n], start = self.prompt(EACH, n), time.perf_counter()
            for tokens in (FEW, MANY):
                self.calls.seconds(self.rows[n], tokens)
            found[f"batch of {n}"] = time.perf_counter() - start
        return {name: round(seconds, 1) for name, seconds in found.items()}

    def unseen(self, seed: int) -> dict[str, Any]:
        """Sizes that never came: the first call, and later ones; what was compiled for them."""
        draw, sizes = random.Random(seed), dict[str, list[float]]()
        graphs, kernels = counters["stats"]["unique_graphs"], self.compiled
        for grid in [*((2 * draw.randint(8, 60), 2 * draw.randint(8, 60)) for _ in range(UNSEEN)), (160, 160)]:
            inputs = self.prompt(grid)
            sizes["x".join(map(str, grid))] = [self.calls.seconds(inputs), self.best(inputs)]
        more = {"graphs": counters["stats"]["unique_graphs"] - graphs, "kernels": self.compiled - kernels}
        return {"unseen sizes: seconds of the first call, and then": sizes, "compiled for unseen sizes": more}

    def products(self, grid: Grid, inputs: dict[str, torch.Tensor], found: Kernels) -> dict[str, float]:
        """Operations of all linears but the head, in 10^12, and of those that are multiplied as codes the device's time."""
        patches, tokens, operations = grid[0] * grid[1], inputs["input_ids"].shape[1], 0
        for name, linear in self.calls.model.named_modules():
            if hasattr(linear, "in_features") and not name.endswith("lm_head"):
                rows = tokens if ".language_model." in name else patches // 4 if ".merger." in name else patches
                operations += 2 * rows * linear.in_features * linear.out_features
        spent = sum(us for kernel, (us, _) in found.items() if PRODUCTS.fullmatch(kernel))
        return {"tera_operations": operations / 1e12, "device_ms": spent / 1e3}

    def measure(self, seed: int) -> Iterator[dict[str, Any]]:
        """Everything else; the device is this process's own."""
        yield self.unseen(seed)
        for name, grid in GRIDS.items():
            inputs = self.prompt(grid)
            clock = 1e3 * self.best(inputs, times=6)
            found = self.calls.kernels(inputs)
            yield {f"first token, {name}": {"clock_ms": clock, **summary(found), "products": self.products(grid, inputs, found)}}
        for n, inputs in self.rows.items():
            yield {f"batch of {n}": {"tokens_per_second": n / self.step(inputs), "first_token_s": self.best(inputs)}}
        if self.rows:
            yield {f"a step of {max(self.rows)}": step(self.calls, self.rows[max(self.rows)])}
        if not self.dry:
            yield {"held_gib": self.held / 2**30, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def compiled(args: argparse.Namespace) -> tuple[Way, dict[str, float]]:
    """The first way, ready to be measured, and what that took."""
    way = Way(args.ways[0], args.dry)
    return way, way.compile(args.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["w4a8", "mquant-w4a8", "bf16"], choices=[*CONFIGS, "bf16"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--seed", type=int, default=1)
    side_by_side.add_arguments(parser, 480.0)
    args = parser.parse_args()

    def measure(found: tuple[Way, dict[str, float]]) -> Iterator[dict[str, Any]]:
        yield {"seconds of the first calls, beside the other ways": found[1]}
        yield from found[0].measure(args.seed)

    if args.child:
        side_by_side.child(args.child, args.ways, lambda: compiled(args), measure)
        return
    words = ["--seed", str(args.seed), "--rows", *map(str, args.rows)]
    side_by_side.report("benchmarks.end_to_end.any_size", args.ways, words, args)


if __name__ == "__main__":
    main()
