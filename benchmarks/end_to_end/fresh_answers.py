"""Whether a service's answers are those of a fresh process, whatever was asked before: docs-vqa through ``compiled_loop``.

    python -m benchmarks.end_to_end.fresh_answers [--device cuda] [--recipe w4a8] [--calls 12] [--beside 4] --out results.json

One process answers a list of calls, twice over: single questions and batches, pages of all sizes, in mixed order.  Then each of
these calls is the only one of a process of its own, and the tokens are compared.  The checkpoint is the same for all.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import CompileConfig, GenerationConfig, Qwen2VLForConditionalGeneration

import mmqc
from benchmarks.gpu_run import Run, facts
from mmqc.config import QuantConfig
from mmqc.samples.processor import END
from mmqc.samples.scoring import to_device

SAMPLE, TOKENS, SEED = "docs-vqa", 48, 7
R = mmqc.recipes
RECIPES: dict[str, Callable[[], QuantConfig]] = {
    "w4a16": lambda: R.rtn(4, group_size=128),
    "w8a8": lambda: R.rtn(8, 8),
    "w4a8": lambda: R.rtn(4, 8),
    "mquant-w4a8": lambda: R.mquant(4),
}
SIZES = (1, 1, 3, 1, 1, 16, 1, 4)  # questions of the calls, in turn


def calls(count: int) -> list[list[int]]:
    """Which questions go together: of all kinds, in an order that is drawn once."""
    sizes = [SIZES[i % len(SIZES)] for i in range(count)]
    asked = list(range(sum(sizes)))
    random.Random(SEED).shuffle(asked)
    return [[asked.pop() for _ in range(size)] for size in sizes]


class Service:
    """A loaded checkpoint that answers."""

    def __init__(self, folder: str, device: str, asked: int) -> None:
        sample = mmqc.samples.load(SAMPLE)
        self.processor, self.questions = sample.processor, sample.questions(asked)
        self.model: Any = Qwen2VLForConditionalGeneration.from_pretrained(folder).to(device).eval()
        mode = CompileConfig(backend="mmqc", mode="reduce-overhead", fullgraph=False)
        self.how = GenerationConfig(
            do_sample=False, pad_token_id=0, eos_token_id=END, max_new_tokens=TOKENS, cache_implementation="static",
            compile_config=mode,
        )  # fmt: skip

    def answer(self, index: Sequence[int]) -> list[list[int]]:
        """The tokens of every question's answer, to its end."""
        chosen = [self.questions[i] for i in index]
        inputs = to_device(self.processor.collate([self.processor(q.prompt, q.images) for q in chosen]), self.model)
        tokens = self.model.generate(**inputs, generation_config=self.how, custom_generate=mmqc.compiled_loop)
        rows = tokens[:, inputs["input_ids"].shape[1] :].tolist()
        return [row[: row.index(END)] if END in row else row for row in rows]


def quantized(recipe: str, device: str, folder: str) -> None:
    """A checkpoint of the sample: on a GPU in bfloat16."""
    sample = mmqc.samples.load(SAMPLE)
    model = sample.model.to(device)
    model = model.bfloat16() if device == "cuda" else model
    batches = [to_device(batch, model) for batch in sample.calibration(32)]
    mmqc.quantize_(model, RECIPES[recipe](), batches, progress=False)
    model.save_pretrained(folder)


def fresh(folder: str, device: str, index: list[int], asked: int) -> list[list[int]]:
    """What a process answers that was asked nothing else."""
    given = json.dumps({"folder": folder, "device": device, "index": index, "asked": asked})
    command = [sys.executable, "-m", "benchmarks.end_to_end.fresh_answers", "--child", given]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(recipe: str, device: str, count: int, beside: int) -> dict[str, Any]:
    """Every call's outcome: the tokens of the first and the second pass, and of a process of its own."""
    wanted = calls(count)
    asked = 1 + max(i for index in wanted for i in index)
    with tempfile.TemporaryDirectory() as folder:
        quantized(recipe, device, folder)
        service = Service(folder, device, asked)
        start = time.perf_counter()
        passes = [[service.answer(index) for index in wanted] for _ in range(2)]
        seconds = time.perf_counter() - start
        del service
        with ThreadPoolExecutor(beside) as pool:
            alone = list(pool.map(lambda index: fresh(folder, device, index, asked), wanted))
    same = [[a == b for a, b in zip(answers, alone, strict=True)] for answers in passes]
    differ = [(index, p[i], alone[i]) for p in passes for i, index in enumerate(wanted) if p[i] != alone[i]]
    return {
        "recipe": recipe,
        "calls": [len(index) for index in wanted],
        "tokens": sum(len(row) for answers in alone for row in answers),
        "same as a fresh process": {"first pass": sum(same[0]), "second pass": sum(same[1]), "of": len(wanted)},
        "different": differ,
        "seconds of both passes": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--recipe", default="w4a8", choices=RECIPES)
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--beside", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        given = json.loads(args.child)
        print(json.dumps(Service(given["folder"], given["device"], given["asked"]).answer(given["index"])))
        return
    found = measure(args.recipe, args.device, args.calls, args.beside)
    text = json.dumps({**facts(Run(args.device == "cpu", 0)), **found}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    if found["different"]:
        raise SystemExit(f"{len(found['different'])} answers are not those of a fresh process")


if __name__ == "__main__":
    main()
