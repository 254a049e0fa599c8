"""The rows of a saturated sample on ten times as many questions: what a mean over 300 of them is worth.

    python -m benchmarks.peers.questions [--sides mmqc peers] [--data build/peers/questions]

On digits three of 300 questions hold most of a mean KL.  All rows that are compared with LLM Compressor, on ``MORE`` questions that
come behind those of the page, so that nobody has looked at them; ``compare.py`` draws the table.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmqc
from benchmarks.peers import compare
from benchmarks.peers.cases import CASES, Case, keys
from benchmarks.peers.drawn import KINDS, LOST, OF_QUESTIONS, read, row
from examples.studies.study import about

SAMPLE, MORE = "digits-vqa", 3000
FEW = 0.01  # of the questions, those with the largest KL


def chosen() -> list[Case]:
    """Of the same method on both sides; those of GPTQ first."""
    rows = [c for c in CASES if c.sample == SAMPLE and c.peer == f"llmcompressor {c.ours}"]
    return sorted(rows, key=lambda c: "gptq" not in c.ours)


def of_few(values: list[float], kinds: list[str]) -> dict[str, Any]:
    """What the questions with the largest values hold of the sum, the median, and of which kinds those are that are lost."""
    largest = np.sort(values)[-round(FEW * len(values)) :]
    lost = Counter(kind for kind, value in zip(kinds, values, strict=True) if value > LOST)
    return {
        "share of few": round(float(largest.sum() / np.sum(values)), 3),
        "median": float(f"{np.median(values):.3g}"),
        "lost, by kind": dict(sorted(lost.items())),
    }


def summary(ours: dict[str, list[float]], theirs: dict[str, list[float]], kinds: list[str]) -> dict[str, Any]:
    """A row: intervals, and how KL is spread over questions of these kinds."""
    spread = {side: of_few(run["kl"], kinds) for side, run in (("mmqc", ours), ("peer", theirs))}
    return row(ours, theirs) | {"spread of KL": spread, "peer": {kind: float(f"{np.mean(theirs[kind]):.4g}") for kind in KINDS}}


def main() -> None:
    """Measure what is not in ``data``, and write of both sides what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=compare.SIDES, default=compare.SIDES)
    parser.add_argument("--data", type=Path, default=compare.ROOT / "build/peers/questions")
    parser.add_argument("--environments", type=Path, default=compare.ROOT / "build/peers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compare.export(SAMPLE, options.data / SAMPLE, compare.CALIBRATION, compare.QUESTIONS + MORE)
    for case in chosen():
        paths = [options.data / f"{key}.json" for key in keys(case)]
        for library, path in zip(compare.SIDES, paths, strict=True):
            if library not in options.sides or path.exists():
                continue
            is_ours = library == "mmqc"
            run = compare.ours(case, options.data) if is_ours else compare.theirs(case, options.data, options.environments)
            path.write_text(json.dumps(run))
            means = {kind: round(float(np.mean(values[compare.QUESTIONS :])), 5) for kind, values in run.items()}
            print(path.stem, means, flush=True)
        if all(path.exists() for path in paths):
            sides = [json.loads(path.read_text()) for path in paths]
            asked = mmqc.samples.load(SAMPLE).questions(compare.QUESTIONS + MORE)[compare.QUESTIONS :]
            behind = [{kind: side[kind][compare.QUESTIONS :] for kind in KINDS} for side in sides]
            found = read(OF_QUESTIONS) | about("python -m benchmarks.peers.questions") | {"questions": MORE}
            found.setdefault("rows", {})[" ".join(keys(case))] = summary(*behind, [question.kind for question in asked])
            OF_QUESTIONS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
