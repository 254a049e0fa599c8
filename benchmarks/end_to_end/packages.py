"""AOTInductor packages of a model of real widths in half precision: are they the model, for more rows than they were exported with?

    python -m benchmarks.end_to_end.packages [--recipes none 'mquant(8)' 'awq(4)' ...] [--seconds 270] [--dry] --out packages.json

Two blocks and two layers of Qwen2-VL-7B's widths with random weights in bfloat16 (``--dry``: of 80 and 128, on the CPU).  Every
recipe has a process, all of them side by side: quantized, exported with prompts of up to 109 tokens, and called with prompts that
it was exported with, another one, and 840 x 840 pixels.  Its logits are compared with the model's; beside them is what rounding
errors move the model's own by.  Milliseconds are those of calls one after the other, by the clock.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import mmqc
from benchmarks.command_line import command_line
from benchmarks.end_to_end.many_gpus_model import config_of
from mmqc.aot.sensitivity import moved, relative_error

RECIPES = ("none", "awq(4)", "rtn(4, 8)", "integer_scale()", "mquant(8)", "mquant(4)")
WORDS, IMAGE = 32064, 32001
GIVEN = ((8, 12, 17), (16, 10, 30), (20, 20, 9))  # patches down and across, tokens of text: what is exported with
CALLED = (*GIVEN, (12, 8, 5), (60, 60, 17))
REPEATS = 20


def build(dry: bool) -> Any:
    """The model."""
    torch.manual_seed(0)
    config = config_of("tiny" if dry else "8b", 2)
    config.text_config.vocab_size, config.vision_config.depth = WORDS, 2
    config.image_token_id, config.vision_start_token_id, config.video_token_id = IMAGE, IMAGE + 1, IMAGE + 2
    with torch.device("cpu" if dry else "cuda"):
        return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()


def prompt(model: Any, down: int, across: int, text: int) -> dict[str, torch.Tensor]:
    """One image, then text."""
    generator, vision = torch.Generator().manual_seed(down), model.config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    ids = torch.cat((torch.full((down * across // 4,), IMAGE), torch.arange(1000, 1000 + text)))[None]
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(down * across, width, generator=generator).to(model.dtype),
        "image_grid_thw": torch.tensor([[1, down, across]]),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
    return {name: value.to(model.device) for name, value in batch.items()}


@torch.no_grad()
def milliseconds(call: Callable[..., Any], batch: dict[str, torch.Tensor]) -> float:
    """Of one call among others."""
    wait: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    for _ in range(3):
        call(**batch)
    wait()
    start = time.perf_counter()
    for _ in range(REPEATS):
        call(**batch)
    wait()
    return (time.perf_counter() - start) / REPEATS * 1e3


def child(recipe: str, dry: bool, folder: Path) -> dict[str, Any]:
    """A recipe's figures."""
    model = build(dry)
    given = [prompt(model, *size) for size in GIVEN]
    if recipe != "none":
        mmqc.quantize_(model, eval(f"mmqc.recipes.{recipe}"), given, progress=False)
    logits = lambda **batch: model(**batch, use_cache=False).logits  # noqa: E731
    start = time.monotonic()
    path = mmqc.export(model, given[0], folder / "model.pt2", programs=["model"])
    figures: dict[str, Any] = {"export_s": time.monotonic() - start, "mib": path.stat().st_size / 2**20}
    figures["moved_by_rounding"] = moved(logits, given[0], model)
    package, compiled = torch._inductor.aoti_load_package(str(path)), torch.compile(model, backend="mmqc")
    for size in CALLED[: -1 if dry else None]:
        batch = prompt(model, *size)
        with torch.no_grad():
            error = relative_error(package(**batch), logits(**batch))
        row = figures.setdefault(f"{batch['input_ids'].shape[1]} tokens", {"relative_error": error})
        print(recipe, row, flush=True)
        if not dry and size in (CALLED[0], CALLED[-1]):
            row["package_ms"], row["eager_ms"] = milliseconds(package, batch), milliseconds(logits, batch)
            row["compiled_ms"] = milliseconds(lambda **b: compiled(**b, use_cache=False).logits, batch)
            print(recipe, row, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seconds", type=float, default=270, help="after which what still runs is ended")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.child:
        args.child.write_text(json.dumps(child(args.recipes[0], args.dry, args.child.parent)))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    figures: dict[str, Any] = {"command": command_line(), "device": device, "torch": torch.__version__, "recipes": {}}
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        places = {recipe: Path(folder) / str(number) / "figures.json" for number, recipe in enumerate(args.recipes)}
        words = [sys.executable, "-m", "benchmarks.end_to_end.packages", *(["--dry"] if args.dry else [])]
        processes = {}
        for recipe, place in places.items():
            place.parent.mkdir()
            with (place.parent / "errors").open("w") as errors:
                processes[recipe] = subprocess.Popen([*words, "--recipes", recipe, "--child", str(place)], stderr=errors)
        for recipe, place in places.items():
            try:
                processes[recipe].wait(max(1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                processes[recipe].kill()
            errors = (place.parent / "errors").read_text()
            figures["recipes"][recipe] = json.loads(place.read_text()) if place.exists() else {"failed": errors[-600:]}
    print(json.dumps(figures["recipes"], indent=1))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
