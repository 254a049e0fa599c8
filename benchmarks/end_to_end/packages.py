"""AOTInductor packages of a model of real widths in half precision: are they the model, for more rows than they were exported with?

    python -m benchmarks.end_to_end.packages [--ways none 'mquant(8)' 'awq(4)' ...] [--seconds 270] [--dry] --out packages.json

Two blocks and two layers of Qwen2-VL-7B's widths with random weights in bfloat16 (``--dry``: of 80 and 128, on the CPU).  A way
is a recipe, or none: quantized, exported with prompts of up to 109 tokens, and called with those, with another one, and with
840 x 840 pixels.  Its logits are compared with the model's; beside them is what rounding errors move the model's own by.
Milliseconds are those of calls one after the other, by the clock.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import mmqc
from benchmarks.end_to_end import side_by_side
from benchmarks.end_to_end.many_gpus_model import config_of, one_image
from mmqc.aot.sensitivity import moved, relative_error

WAYS = ("none", "awq(4)", "rtn(4, 8)", "integer_scale()", "mquant(8)", "mquant(4)")
WORDS, IMAGE = 32064, 32001
GIVEN = ((8, 12, 17), (16, 10, 30), (20, 20, 9))  # patches down and across, tokens of text: what is exported with
CALLED = (*GIVEN, (12, 8, 5), (60, 60, 17))
TIMED = (CALLED[0], CALLED[-1])
REPEATS = 20


def build(dry: bool) -> Any:
    """The model."""
    torch.manual_seed(0)
    config = config_of("tiny" if dry else "8b", 2)
    config.text_config.vocab_size, config.vision_config.depth = WORDS, 2
    config.image_token_id, config.vision_start_token_id, config.video_token_id = IMAGE, IMAGE + 1, IMAGE + 2
    with torch.device("cpu" if dry else "cuda"):
        return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def milliseconds(call: Callable[..., Any], batch: dict[str, torch.Tensor]) -> float:
    """Of one call among others, on a GPU."""
    for _ in range(3):
        call(**batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        call(**batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS * 1e3


class Way:
    """A recipe's model and its package."""

    def __init__(self, recipe: str, dry: bool) -> None:
        self.dry, self.model = dry, build(dry)
        self.given = [one_image(self.model, *size) for size in GIVEN]
        if recipe != "none":
            mmqc.quantize_(self.model, eval(f"mmqc.recipes.{recipe}"), self.given, progress=False)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            path = mmqc.export(self.model, self.given[0], Path(folder) / "model.pt2", programs=["model"])
            self.found: dict[str, Any] = {"export_s": time.monotonic() - start, "mib": path.stat().st_size / 2**20}
            self.package = torch._inductor.aoti_load_package(str(path))
        self.compiled = torch.compile(self.model, backend="mmqc")
        self.compare()

    def logits(self, **batch: torch.Tensor) -> torch.Tensor:
        """The model's."""
        return self.model(**batch, use_cache=False).logits

    @torch.no_grad()
    def compare(self) -> None:
        """The package's figures that no other process disturbs; the compiled model is warm behind it."""
        self.found["moved_by_rounding"] = moved(self.logits, self.given[0], self.model)
        for size in CALLED[: -1 if self.dry else None]:
            batch = one_image(self.model, *size)
            error = relative_error(self.package(**batch), self.logits(**batch))
            self.found[tokens(batch)] = {"relative_error": error}
        for size in TIMED if not self.dry else ():
            self.compiled(**one_image(self.model, *size), use_cache=False)

    def measure(self) -> Iterator[dict[str, Any]]:
        """With the device to itself."""
        yield self.found
        for size in TIMED if not self.dry else ():
            batch = one_image(self.model, *size)
            self.found[tokens(batch)] |= {
                "package_ms": milliseconds(self.package, batch),
                "eager_ms": milliseconds(self.logits, batch),
                "compiled_ms": milliseconds(lambda **b: self.compiled(**b, use_cache=False).logits, batch),
            }
            yield self.found


def tokens(batch: dict[str, torch.Tensor]) -> str:
    """The name of a batch's figures."""
    return f"{batch['input_ids'].shape[1]} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    side_by_side.add_arguments(parser, 270.0)
    args = parser.parse_args()
    if args.child:
        side_by_side.child(args.child, args.ways, lambda: Way(args.ways[0], args.dry), Way.measure)
        return
    side_by_side.report("benchmarks.end_to_end.packages", args.ways, [], args)


if __name__ == "__main__":
    main()
