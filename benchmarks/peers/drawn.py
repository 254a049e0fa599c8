"""What draws.py and orders.py measured, as tables: differences over draws of calibration or orders of channels, and questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.cases import CASES, keys, name_of, verdict
from examples.studies.study import table

RESULTS = Path(__file__).resolve().parents[1] / "results/peer_draws.json"
RESULTS_OF_ORDERS = RESULTS.with_name("peer_orders.json")
DRAWS = (1, 2, 3, 4)  # the page's own is 0
ORDERS = (1, 2, 3, 4, 5, 6, 7, 8)  # of channels; the page's own is 0
TIMES = 10_000


def read(path: Path = RESULTS) -> dict[str, Any]:
    """What is on file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


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


def of_orders(found: dict[str, Any]) -> str:
    """The table of what orders.py has on file, and how often mmqc is what."""
    lines, said = [], []
    for case in CASES:
        if (one := found.get("rows", {}).get(" ".join(keys(case)))) is None:
            continue
        cells = []
        for kind, digits in (("nll", 4), ("kl", 5)):
            row = one[kind]
            mean, low, high = row["difference"]
            less = sum(a < b for a, b in zip(row["mmqc"], row["peer"], strict=True))
            cells += [
                f"{np.mean(row['mmqc']):.{digits}f} / {np.mean(row['peer']):.{digits}f}",
                f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]",
                f"{less} of {len(row['mmqc'])}",
            ]
            said.append(row["mmqc is"])
        spread = " / ".join(f"{min(one['kl'][side]):.4f} to {max(one['kl'][side]):.4f}" for side in ("mmqc", "peer"))
        lines.append((case.form, case.ours, *cells, spread, *said[-2:]))
    head = (
        "form",
        "mmqc and peer",
        "NLL",
        "difference",
        "less",
        "KL",
        "difference",
        "less",
        "KL of the orders",
        "by NLL mmqc is",
        "by KL",
    )
    counts = ", ".join(f"{said.count(word)} {word}" for word in ("better", "tie", "worse"))
    return f"{counts} of {len(said)} intervals:\n\n{table(head, lines)}"
