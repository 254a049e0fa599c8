"""A thousand compiled ``generate`` calls of fifty shapes in one process: memory, compilations, and the tokens themselves.

    python -m benchmarks.surveys.soak [--calls 1000] [--only mquant/compiled_loop ...]

The model of digits-vqa; prompts of 0 to 3 images of many sizes, batches of 1 to 4 padded on the left, 1 to 8 new tokens, in an
order that is drawn: each shape comes equally often.  Resident memory is read every ``EVERY`` calls, after a collection and with
freed pages given back; the ratio is that of the readings behind the first ``SETTLED`` calls, when every shape has come.  All tokens
are compared with those of the eager model.  Writes benchmarks/results/soak.json, row by row.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers import GenerationConfig

import mmqc
from mmqc import recipes

ROOT = Path(__file__).resolve().parents[2]
SHAPES, EVERY, SETTLED = 50, 10, 100
MODELS = ("float", "mquant", "calibquant")
WAYS = ("compiled", "compiled_loop")
Call = dict[str, Any]


def model_of(which: str) -> tuple[Any, Any]:
    """The model and its processor."""
    sample = mmqc.samples.load("digits-vqa")
    if which != "float":
        recipe = recipes.mquant(8, solver="rtn") if which == "mquant" else recipes.calibquant(bits=2)
        mmqc.quantize_(sample.model, recipe, calibration=sample.calibration(4), progress=False)
    return sample.model, sample.processor


def shapes(processor: Any, count: int = SHAPES) -> list[Call]:
    """Calls that differ in their numbers of prompts, images and tokens, and in the sizes of images."""
    draw = np.random.default_rng(0)
    found: dict[tuple[Any, ...], Call] = {}
    while len(found) < count:
        prompts = [_prompt(processor, draw) for _ in range(int(draw.integers(1, 5)))]
        batch = processor.collate(prompts)
        new = int(draw.integers(1, 9))
        grids = tuple(map(tuple, batch["image_grid_thw"].tolist())) if "image_grid_thw" in batch else ()
        found.setdefault((*batch["input_ids"].shape, grids, new), {**batch, "max_new_tokens": new})
    return list(found.values())


def _prompt(processor: Any, draw: np.random.Generator) -> dict[str, Any]:
    images = [draw.integers(0, 256, (*(8 * draw.integers(2, 9, 2)), 3), dtype=np.uint8) for _ in range(int(draw.integers(0, 4)))]
    text = "".join(f"image {i}: <image>\n" for i in range(1, len(images) + 1))
    return processor(text + "read image 1." * int(draw.integers(1, 4)) + "\n", images)


def answers(model: Any, way: str, which: str) -> Callable[[Call], torch.Tensor]:
    """How the model is asked."""
    config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=1)
    if which != "calibquant" and way == "compiled_loop":
        config.cache_implementation = "static"
    if way == "compiled":
        model.compile(backend="mmqc")
    more = {"custom_generate": mmqc.compiled_loop} if way == "compiled_loop" else {}

    def ask(call: Call) -> torch.Tensor:
        return model.generate(**call, generation_config=config, **more)

    return ask


def compilations() -> int:
    """Graphs that Dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def resident() -> float:
    """MiB of this process in memory, freed pages given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@torch.no_grad()
def soak(which: str, way: str, calls: int) -> dict[str, Any]:
    """One process's thousand calls."""
    model, processor = model_of(which)
    kinds = shapes(processor)
    eager = [answers(model, "eager", which)(dict(call)) for call in kinds]
    ask = answers(model, way, which)
    draw = np.random.default_rng(1)
    order = np.concatenate([draw.permutation(SHAPES) for _ in range(-(-calls // SHAPES))])[:calls].tolist()
    compiled_at: list[int] = []
    memory: dict[int, float] = {}
    wrong, start = 0, time.perf_counter()
    for number, shape in enumerate(tqdm(order, desc=f"{which}/{way}", unit="call")):
        before = compilations()
        got = ask(dict(kinds[shape]))
        wrong += not torch.equal(got, eager[shape])
        if compilations() > before:
            compiled_at.append(number + 1)
        if (number + 1) % EVERY == 0:
            memory[number + 1] = round(resident(), 1)
    settled = [size for number, size in memory.items() if number >= min(SETTLED, calls // 2)]
    return {
        "model": which,
        "way": way,
        "calls": calls,
        "shapes": SHAPES,
        "seconds": round(time.perf_counter() - start, 1),
        "other tokens than eager": wrong,
        "compiled at calls": compiled_at,
        "graphs": compilations(),
        "MiB at the first and last reading": [settled[0], settled[-1]],
        "largest over smallest": round(max(settled) / min(settled), 4),
        "MiB": memory,
    }


def main() -> None:
    """Run each row in a process of its own, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[f"{model}/{way}" for model in MODELS for way in WAYS])
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "soak.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.row:
        print(json.dumps(soak(*options.row.split("/"), options.calls)))
        return
    rows: list[dict[str, Any]] = []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    facts = {"torch": torch.__version__, "transformers": transformers.__version__, "commit": commit.stdout.strip()}
    facts |= {"machine": platform.processor() or platform.machine(), "command": "python -m benchmarks.surveys.soak"}
    for name in options.only:
        command = [sys.executable, "-m", "benchmarks.surveys.soak", "--row", name, "--calls", str(options.calls)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print({key: value for key, value in rows[-1].items() if key != "MiB"}, flush=True)
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
