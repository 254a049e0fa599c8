"""A model saved on one machine and loaded on another, with other versions of torch: does it answer alike?

    python -m benchmarks.surveys.carry_model save DIRECTORY [--device cuda] [--questions 20]     quantizes, saves model and answers
    python -m benchmarks.surveys.carry_model check DIRECTORY [--device cpu] [--out results.json] loads them, answers again

The model is the shipped sample with ``recipes.mquant(4)``.  Compared are the logits of the questions, the answers, and (by the
loader, tensor by tensor) the SHA-256 of what was saved.  The exit code is 1 if an answer differs or logits do by more than BOUND.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import mmqc
from mmqc.samples.processor import END

BOUND = 3e-2  # another order of a sum now and then moves a value across a tie: its code is another one
LONGEST = 64
ANSWERS = "answers.safetensors"


def versions(device: str) -> dict[str, str]:
    """Of what computes."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {"device": device, "machine": name, "torch": torch.__version__, "transformers": transformers.__version__}


@torch.no_grad()
def answered(model: Any, batch: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """The logits of a question and the tokens of its answer."""
    there = {name: t.to(device) for name, t in batch.items()}
    logits = model(**there, use_cache=False).logits
    ids = model.generate(**there, max_new_tokens=LONGEST, do_sample=False, eos_token_id=END, pad_token_id=0)
    return {"logits": logits.float().cpu(), "answer": ids[:, batch["input_ids"].shape[1] :].cpu().contiguous()}


def save(folder: Path, device: str, questions: int) -> int:
    """Quantize, answer, save."""
    sample = mmqc.samples.load("digits-vqa")
    model: Any = sample.model.to(device)
    calibration = [{name: t.to(device) for name, t in batch.items()} for batch in sample.calibration(16)]
    report = mmqc.quantize_(model, mmqc.recipes.mquant(4), calibration=calibration, progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "model")
    tensors: dict[str, Tensor] = {}
    for number, question in enumerate(sample.questions(questions)):
        batch = sample.processor(question.prompt, question.images)
        parts = {**{f"input.{n}": t for n, t in batch.items()}, **answered(model, batch, device)}
        tensors |= {f"{number}/{n}": t.contiguous() for n, t in parts.items()}
    save_file(tensors, folder / ANSWERS)
    (folder / "saved.json").write_text(json.dumps(versions(device)) + "\n")
    print(f"{len(report.layers)} quantized linears, {questions} answers, {versions(device)}")
    return 0


def check(folder: Path, device: str, out: Path | None) -> int:
    """Load, answer again, compare."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model").to(device).eval()
    errors, same, tokens = [], 0, 0
    saved = load_file(folder / ANSWERS)
    numbers = {int(n.partition("/")[0]) for n in saved}
    for number in sorted(numbers):
        tensors = {n.partition("/")[2]: t for n, t in saved.items() if n.startswith(f"{number}/")}
        batch = {n.removeprefix("input."): t for n, t in tensors.items() if n.startswith("input.")}
        got = answered(model, batch, device)
        errors.append(float((got["logits"] - tensors["logits"]).norm() / tensors["logits"].norm()))
        same += torch.equal(got["answer"], tensors["answer"])
        tokens += tensors["answer"].numel()
    row = {
        **versions(device),
        "saved": json.loads((folder / "saved.json").read_text()),
        "questions": len(numbers),
        "same_answers": same,
        "tokens": tokens,
        "logits_error": max(errors, default=float("nan")),
        "equal_to_the_bit": sum(e == 0 for e in errors),
        "command": "python -m benchmarks.surveys.carry_model check",
    }
    print(json.dumps(row, indent=1))
    if out:
        out.write_text(json.dumps(row, indent=1) + "\n")
    return int(not numbers or same < len(numbers) or not max(errors) <= BOUND)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("save", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "save":
        return save(options.folder, options.device, options.questions)
    return check(options.folder, options.device, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
