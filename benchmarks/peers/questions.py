"""The rows of a saturated sample on ten times as many questions: what a mean over 300 of them is worth.

    python -m benchmarks.peers.questions [--sides mmqc peers] [--data build/peers/questions]

On digits three of 300 questions hold most of a mean KL.  All rows that are compared with LLM Compressor, on ``MORE`` questions that
come behind those of the page, so that nobody has looked at them; ``compare.py`` draws the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.again import KINDS, row
from benchmarks.peers.cases import CASES, Case, keys, verdict
from examples.studies.study import about, table

RESULTS = Path(__file__).resolve().parents[1] / "results/peer_questions.json"
SAMPLE, MORE = "digits-vqa", 3000
FEW = 0.01  # of the questions, those with the largest KL


def chosen() -> list[Case]:
    """Of the same method on both sides; those of GPTQ first."""
    rows = [c for c in CASES if c.sample == SAMPLE and c.peer == f"llmcompressor {c.ours}"]
    return sorted(rows, key=lambda c: "gptq" not in c.ours)


def read() -> dict[str, Any]:
    """What is on file."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}


def of_few(values: list[float]) -> dict[str, float]:
    """What the questions with the largest values hold of the sum, and the median."""
    largest = np.sort(values)[-round(FEW * len(values)) :]
    return {"share of few": round(float(largest.sum() / np.sum(values)), 3), "median": float(f"{np.median(values):.3g}")}


def summary(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> dict[str, Any]:
    """A row: intervals, and how KL is spread over questions."""
    return row(ours, theirs) | {"spread of KL": {"mmqc": of_few(ours["kl"]), "peer": of_few(theirs["kl"])}, "peer": {
        kind: float(f"{np.mean(theirs[kind]):.4g}") for kind in KINDS}}  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """The table, and how often mmqc is what."""
    lines, said = [], []
    for case in CASES:
        if (one := found["rows"].get(" ".join(keys(case)))) is None:
            continue
        cells = []
        for kind, digits in KINDS.items():
            mean, low, high = one[kind]["difference"]
            cells += [f"{one[kind]['mean']:.{digits}f} / {one['peer'][kind]:.{digits}f}",
                      f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"]  # fmt: skip
            said.append(verdict(low, high))
        sides = [one["spread of KL"][side] for side in ("mmqc", "peer")]
        cells.append(" / ".join(f"{side['median']:.1e}" for side in sides))
        cells.append(" / ".join(f"{side['share of few']:.0%}" for side in sides))
        lines.append((case.form, case.ours, *cells, *said[-2:]))
    head = ("form", "mmqc and peer", "NLL", "difference", "KL", "difference", "median KL", "in 1 % of questions", "by NLL mmqc is",
            "by KL")  # fmt: skip
    counts = ", ".join(f"{said.count(word)} {word}" for word in ("better", "tie", "worse"))
    return f"""Digits, {len(lines)} rows, {found.get("questions", 0):,} questions behind those of the page ({counts} of {len(said)}
intervals; `python -m benchmarks.peers.questions`):

{table(head, lines)}"""


def main() -> None:
    """Measure what is not in ``data``, and write of both sides what is there."""
    from benchmarks.peers import compare

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
            mmqc = library == "mmqc"
            run = compare.ours(case, options.data) if mmqc else compare.theirs(case, options.data, options.environments)
            path.write_text(json.dumps(run))
            means = {kind: round(float(np.mean(values[compare.QUESTIONS :])), 5) for kind, values in run.items()}
            print(path.stem, means, flush=True)
        if all(path.exists() for path in paths):
            sides = [json.loads(path.read_text()) for path in paths]
            behind = [{kind: side[kind][compare.QUESTIONS :] for kind in KINDS} for side in sides]
            found = read() | about("python -m benchmarks.peers.questions") | {"questions": MORE}
            found["rows"][" ".join(keys(case))] = summary(*behind)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
