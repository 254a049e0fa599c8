"""A package of all layers of a 7B decoder, with one file of weights: what it takes to make, to load and to call.

    python -m benchmarks.end_to_end.whole_package [--layers 28] [--programs prefill decode] [--recipe 'rtn(4, 8)'] [--plain]
        --out FILE.json

Qwen2-VL-7B's widths with random weights in bfloat16; of the tower's 32 blocks two, which prefill and decode do not have.  The
layers are copies of one, with memory of their own.  Exported with prompts of up to 109 tokens, called with 840 x 840 pixels and 17
tokens of text.  Milliseconds are those of calls one after the other, by the clock; a decode step is also captured in a CUDA graph.
``--plain`` leaves the run-time passes out, to see what they are for.  A row of the same arguments is replaced.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import transformers

import mmqc
from benchmarks.end_to_end.many_gpus_model import config_of, one_image, repeat_layers
from benchmarks.end_to_end.packages import milliseconds
from benchmarks.gpu_run import Run, facts
from mmqc.aot import exportable
from mmqc.aot.packed_programs import steps_of
from mmqc.aot.weights import Weights
from mmqc.lowering.package import load_program

GIVEN = ((16, 10, 30), (20, 20, 9))  # patches down and across, tokens of text
CALLED = (60, 60, 17)
DEPTH = 2  # of the tower


def build(recipe: str, layers: int) -> Any:
    """The quantized model."""
    torch.manual_seed(0)
    config = config_of("8b", 2)
    config.vision_config.depth = DEPTH
    with torch.device("cuda"):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    mmqc.quantize_(model, eval(f"mmqc.recipes.{recipe}"), [one_image(model, *size) for size in GIVEN], progress=False)
    repeat_layers(model, layers)
    return model


def gib(before: int = 0) -> float:
    """Of the device, taken by anybody, less what was before."""
    free, total = torch.cuda.mem_get_info()
    return (total - free - before) / 2**30


def measured(run: Run, recipe: str, layers: int, programs: list[str], folder: Path) -> dict[str, Any]:
    """A row."""
    model, steps = build(recipe, layers), {}
    started = time.monotonic()

    def say(text: str) -> None:
        steps[text] = round(time.monotonic() - started, 1)
        print(f"{steps[text]:6.1f} s  {text}", flush=True)

    torch.cuda.reset_peak_memory_stats()
    given, file = one_image(model, *GIVEN[0]), folder / "weights.safetensors"
    path = mmqc.export(model, given, folder / "model.pt2", programs=programs, weights=file, say=say)
    row: dict[str, Any] = {"export_s": time.monotonic() - started, "steps_s": steps}
    row |= {"package_mib": path.stat().st_size / 2**20, "weights_gib": file.stat().st_size / 2**30}
    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    inputs = {p: v for p, v in steps_of(model, given).batches(one_image(model, *CALLED)).items() if p in programs}
    del model
    gc.collect()
    torch.cuda.empty_cache()
    row["left_behind_gib"] = torch.cuda.memory_allocated() / 2**30
    before, started = int(gib() * 2**30), time.monotonic()
    weights = Weights.read(file, torch.device("cuda"))
    loaded = {p: load_program(path, p, functools.partial(weights.of_program, p)) for p in programs}
    torch.cuda.synchronize()
    row |= {"load_s": time.monotonic() - started, "loaded_gib": gib(before)}
    for name, program in loaded.items():
        row[f"{name}_ms"] = milliseconds(program, inputs[name])
    if "decode" in loaded:
        alone = load_program(path, "decode", functools.partial(weights.of_program, "decode"), single_threaded=True)
        row["decode_graph_ms"] = run.microseconds([lambda: alone(**inputs["decode"])]) / 1e3
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--programs", nargs="+", default=["prefill", "decode"])
    parser.add_argument("--recipe", default="rtn(4, 8)")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = Run(dry=False, seconds=0)
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    given = {"recipe": args.recipe, "layers": args.layers, "programs": args.programs, "fused": not args.plain}
    rows = [r for r in rows if r | given != r]
    plain = mock.patch.object(exportable, "fused", lambda program: program) if args.plain else nullcontext()
    with torch.no_grad(), TemporaryDirectory() as folder, plain:
        found = measured(run, args.recipe, args.layers, args.programs, Path(folder))
    about = facts(run)
    rows.append(given | found | {"commit": about.pop("commit")})
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
