"""What draws.py measured, as a table: differences over draws of calibration and questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.cases import CASES, keys, name_of, verdict
from examples.studies.study import table

RESULTS = Path(__file__).resolve().parents[1] / "results/peer_draws.json"
DRAWS = (1, 2, 3, 4)  # the page's own is 0
TIMES = 10_000


def read() -> dict[str, Any]:
    """What is on file."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"runs": {}}


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """(Mean, low, high) of differences [draws, questions]."""
    dice = np.random.default_rng(0)
    draws, questions = differences.shape
    means = [
        differences[dice.integers(draws, size=draws)][:, dice.integers(questions, size=questions)].mean() for _ in range(TIMES)
    ]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(differences.mean()), float(low), float(high)


def lines(runs: dict[str, Any]) -> str:
    """The table of what is on file of both sides."""
    found = []
    for case in CASES:
        pairs = [tuple(runs.get(f"{key} draw {draw}") for key in keys(case)) for draw in DRAWS]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not both:
            continue
        cells, said = [], []
        for kind, digits in (("nll", 4), ("kl", 5)):
            a, b = (np.array([side[kind] for side in sides]) for sides in zip(*both, strict=True))
            mean, low, high = interval(a - b)
            cells += [
                f"{a.mean():.{digits}f} / {b.mean():.{digits}f}",
                f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]",
            ]
            said.append(verdict(low, high))
        found.append((case.form, name_of(case.sample), case.ours, str(len(both)), *cells, *said))
    head = ("form", "sample", "mmqc and peer", "draws", "NLL", "difference", "KL", "difference", "by NLL mmqc is", "by KL")
    return table(head, found)
