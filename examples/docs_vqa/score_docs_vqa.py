"""Greedy answers of a docs-vqa model to held-out questions: `python -m examples.docs_vqa.score_docs_vqa --model DIR`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmqc.samples import handwriting
from mmqc.samples.docs import questions
from mmqc.samples.docs.alphabet import END
from mmqc.samples.questions import Question
from mmqc.samples.sample import docs_processor

DEV_SEED = 3  # neither calibration's nor evaluation's


@torch.no_grad()
def answers(model: Any, batch: Sequence[Question], device: str) -> list[str]:
    """The model's own answers, up to their end token."""
    processor = docs_processor()
    inputs = processor.collate([processor(q.prompt, q.images) for q in batch], multiple_of=16)
    inputs = {name: x.to(device) for name, x in inputs.items()}
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        tokens = model.generate(**inputs, max_new_tokens=max(len(q.answer) for q in batch) + 1, do_sample=False)
    rows = tokens[:, inputs["input_ids"].shape[1] :].tolist()
    return [processor.decode(row[: row.index(END)] if END in row else row) for row in rows]


def score_to(path: Path, model: Any, count: int, seconds: float, device: str) -> None:
    """Write the share of exact answers by kind, and the answers; kinds that do not fit into the time are left out, and said."""
    begin, hand = time.time(), handwriting.load_split("calibration")
    asked = [questions.question(DEV_SEED, i, hand) for i in range(count)]
    found: dict[str, Any] = dict(exact={}, answers=[])
    for kind in questions.KINDS:
        batch = sorted((q for q in asked if q.kind == kind), key=lambda q: sum(i.size for i in q.images))
        right = []
        size = 8 if kind == "page" else 40
        for start in range(0, len(batch), size):
            if time.time() - begin > seconds - 5:
                found["cut"] = f"time was over at {kind}"
                break
            part = batch[start : start + size]
            for q, answer in zip(part, answers(model, part, device), strict=True):
                right.append(answer == q.answer)
                found["answers"].append([kind, q.question, q.answer, answer])
        if right:
            found["exact"][kind] = round(sum(right) / len(right), 4)
        print(kind, found["exact"].get(kind), f"{time.time() - begin:.0f} s", flush=True)
        path.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    from mmqc.samples.docs import checkpoint

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/scores.json"))
    parser.add_argument("--questions", type=int, default=360)
    parser.add_argument("--seconds", type=float, default=500)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    score_to(args.out, checkpoint.load(args.model).to(device), args.questions, args.seconds, device)


if __name__ == "__main__":
    main()
