"""The first calls of a process: seconds to a first token, cold and for sizes that never came, and where they went.

    python -m benchmarks.end_to_end.cold_start [--config w4a8] [--profile] [--dry [--layers 28 32]] [--out cold_start.json]

Qwen2-VL-7B's shape with random weights, through ``generate`` and ``mmqc.compiled_loop``, on a GPU; ``--dry``: a small model of
as many layers as it takes to compile like ones once, or of ``--layers``, on the CPU.  Adds a run to the file.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._dynamo.utils import compilation_time_metrics, counters
from transformers import CompileConfig, GenerationConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

import mmqc
from benchmarks.rewrites import batch_of, model_of
from mmqc import recipes
from mmqc.front.find import Finder

ROOT = Path(__file__).resolve().parents[2]
IMAGE = 151655
PHASES = ("_compile.compile_inner", "bytecode_tracing", "build_guards", "create_aot_dispatcher_function", "compile_fx_inner")
CONFIGS = {
    "w4a8": lambda: recipes.rtn(4, 8, head_bits=8),
    "w8a8": lambda: recipes.rtn(8, 8, head_bits=8),
    "w4a16": lambda: recipes.rtn(4, group_size=128, head_bits=8),
    "mquant-w4a8": lambda: recipes.mquant(4, solver="rtn", head_bits=8),
}
Grid = tuple[int, int]


def prompt(model: Any, grid: Grid, text: int = 17) -> dict[str, torch.Tensor]:
    """An image of ``grid`` patches of 14 pixels, and some words."""
    (h, w), device, image = grid, model.device, model.config.image_token_id
    ids = torch.cat((torch.full((h * w // 4,), image), torch.arange(100, 100 + text)))[None].to(device)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(h * w, 1176).to(device, model.dtype),
        "image_grid_thw": torch.tensor([[1, h, w]]).to(device),
        "mm_token_type_ids": (ids == image).long(),
    }


def small_model(layers: int = 6, blocks: int = 6) -> Any:
    """A narrow decoder and tower."""
    text = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    none = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    vision = dict(depth=blocks, embed_dim=64, hidden_size=128, num_heads=4, mlp_ratio=2, patch_size=14)
    config = Qwen2VLConfig(
        text_config={**text, "vocab_size": 1000, "rope_parameters": rope, **none}, vision_config=vision, image_token_id=999
    )
    return Qwen2VLForConditionalGeneration(config).eval()


def kernels_made() -> list[str]:
    """Names of kernels, as Triton compiles or loads them from here on."""
    import triton

    names: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **told: names.append(told["fn"].name)
    return names


def watched(call: Callable[[], float]) -> tuple[float, dict[str, float]]:
    """A call's seconds, and where the host spent most of them: functions by their own time, those of C++ too."""
    profiler = cProfile.Profile()
    took = profiler.runcall(call)
    rows: dict[tuple[str, int, str], tuple[Any, ...]] = getattr(pstats.Stats(profiler), "stats")  # noqa: B009  not in its type
    most = sorted(rows.items(), key=lambda row: -row[1][2])[:10]
    return took, {f"{file.rpartition('/')[2]}:{line} {name}": round(row[2], 3) for (file, line, name), row in most}


def measure(model: Any, grids: list[Grid], large: Grid, tokens: int, profiled: bool = False) -> dict[str, Any]:
    """Every figure of a process that has compiled nothing."""
    device = model.device.type
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    config = GenerationConfig(
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=CompileConfig(backend="mmqc", mode="reduce-overhead", fullgraph=False),
    )
    trials: list[float] = []
    find = Finder.find

    def timed_find(finder: Finder) -> Any:
        start = time.perf_counter()
        try:
            return find(finder)
        finally:
            trials.append(time.perf_counter() - start)

    setattr(Finder, "find", timed_find)  # noqa: B010

    def seconds(inputs: dict[str, torch.Tensor], new: int = 1) -> float:
        wait()
        start = time.perf_counter()
        config.max_new_tokens = config.min_new_tokens = new
        model.generate(**inputs, generation_config=config, custom_generate=mmqc.compiled_loop)
        wait()
        return round(time.perf_counter() - start, 4)

    def spent() -> dict[str, float]:
        found = {phase: round(sum(compilation_time_metrics.get(phase, ())), 2) for phase in PHASES}
        compilation_time_metrics.clear()
        return found

    first, *others = (prompt(model, grid) for grid in grids)
    figures: dict[str, Any] = {}

    def note(**found: Any) -> None:  # at once: a run that is cut off has said what it found
        figures.update(found)
        print(json.dumps(found), flush=True)

    note(first_prompt_s=seconds(first), spent=spent(), trial_forwards_s=round(sum(trials), 2))
    made = kernels_made() if device == "cuda" else []
    for (h, w), given in zip(grids[1:], others, strict=True):
        took, host = watched(partial(seconds, given)) if profiled else (seconds(given), {})
        sizes = figures.get("first_calls_of_other_sizes", {}) | {f"{h}x{w}": [took, dict(Counter(made)), host]}
        made.clear()
        note(first_calls_of_other_sizes=sizes)
    note(first_step_s=seconds(others[0], tokens // 4), spent_on_the_step=spent())
    note(first_token_s=min(seconds(others[0]) for _ in range(5)))
    if device == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            seconds(others[0])
        note(on_the_device_s=sum(e.self_device_time_total for e in profiler.key_averages()) / 1e6)
    few, many = (min(seconds(others[0], n) for _ in range(3)) for n in (tokens // 8, tokens))
    note(tokens_per_second=round((tokens - tokens // 8) / (many - few), 1))
    note(largest_first_and_then=[seconds(prompt(model, large)) for _ in range(3)])
    note(graphs=counters["stats"].get("unique_graphs"))
    return figures


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CONFIGS, default="w4a8")
    parser.add_argument(
        "--profile", action="store_true", help="where the host spends the first calls of other sizes, which take longer"
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--layers", type=int, nargs=2, default=(6, 6), help="of the small model's decoder and of its tower")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cold_start.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    config: Any = CONFIGS[options.config]()
    model: Any = small_model(*options.layers) if options.dry else model_of("qwen2_vl_7b", "cuda").eval()
    batch = prompt(model, (8, 8)) if options.dry else batch_of("qwen2_vl_7b", model, "cuda")
    mmqc.quantize_(model, config, [batch] if config.needs_calibration else None, progress=False)
    grids = (
        [(12, 8), (8, 8), (20, 10), (6, 4)]
        if options.dry
        else [(30, 30), (60, 60), (40, 80), (44, 30), (20, 34), (110, 98), (16, 16)]
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    run = {
        "command": f"python -m benchmarks.end_to_end.cold_start --config {options.config}"
        + (f" --dry --layers {options.layers[0]} {options.layers[1]}" if options.dry else ""),
        "device": "cpu" if options.dry else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
        "machine": platform.machine(),
        "figures": measure(model, grids, (40, 40) if options.dry else (160, 160), 32 if options.dry else 144, options.profile),
    }
    runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    options.out.write_text(json.dumps({"runs": [*runs, run]}, indent=1) + "\n")
    print(json.dumps(run, indent=1))


if __name__ == "__main__":
    main()
