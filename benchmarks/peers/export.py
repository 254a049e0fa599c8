"""What every library reads: the float checkpoint, calibration batches, questions, and what the float model answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models

import mmqc
from benchmarks.peers.answers import answers

BATCH = 32


def question_batches(sample: Any, n: int) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """(batches of questions with answers of one length; the right answers' ids [T] of each question)."""
    groups: dict[tuple[str, int], list[int]] = {}
    asked = sample.questions(n)
    for number, question in enumerate(asked):
        groups.setdefault((question.kind, len(question.answer)), []).append(number)
    batches, ids = [], {}
    for numbers in groups.values():
        for start in range(0, len(numbers), BATCH):
            part = numbers[start : start + BATCH]
            questions = [asked[i] for i in part]
            inputs = sample.processor.collate([sample.processor(q.prompt, q.images, answer=q.answer) for q in questions])
            size = len(questions[0].answer) + 1
            batches.append({"inputs": dict(inputs), "numbers": part, "size": size})
            ids |= {number: row[-size:].clone() for number, row in zip(part, inputs["input_ids"], strict=True)}
    return batches, [ids[number] for number in sorted(ids)]


def unchanged(model: Any) -> None:
    """A sample's model as it is."""


def calibration_of(sample: Any, count: int, draw: int = 0) -> list[Any]:
    """So many batches; each draw has others."""
    return sample.calibration(count * (draw + 1))[count * draw :]


def export(
    name: str, folder: Path, calibration: int, questions: int, draw: int = 0, change: Callable[[Any], None] = unchanged
) -> None:
    """Write the sample ``name`` into ``folder``, its model as ``change`` leaves it; what is there already is kept."""
    if (folder / "questions.pt").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    sample = mmqc.samples.load(name)
    change(sample.model)
    sample.model.save_pretrained(folder / "model")
    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))  # one is asked for, and never used
    torch.save([dict(batch) for batch in calibration_of(sample, calibration, draw)], folder / "calibration.pt")
    batches, ids = question_batches(sample, questions)
    torch.save({"batches": batches, "ids": ids, "exact": answers(sample.model, batches)}, folder / "questions.pt")
