"""What the scripts beside it have measured once more, as the page says it: draws, orders, questions, errors, another machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.cases import CASES, Case, keys, name_of, nearest, verdict
from examples.studies.study import table
from mmqc.samples.scoring import bootstrap

RESULTS = Path(__file__).resolve().parents[1] / "results"
OF_DRAWS, OF_ORDERS, OF_QUESTIONS, OF_ERRORS, OF_AGAIN, OF_ASYMMETRIC = (
    RESULTS / f"peer_{what}.json" for what in ("draws", "orders", "questions", "held_out", "again", "asymmetric")
)
KINDS = {"nll": 4, "kl": 5}  # and their digits
LOST = 0.1  # a KL from which on the answer is another one, or nearly
ERRORS = "errors over the peer's: on the batches read, on others"
DRAWS = (1, 2, 3, 4)  # the page's own is 0
ORDERS = (1, 2, 3, 4, 5, 6, 7, 8)  # of channels; the page's own is 0
TIMES = 10_000
TINY = 1e-9  # of a KL: below, its logarithm is rounding's


def read(path: Path) -> dict[str, Any]:
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


def on_file(found: dict[str, Any], rows: str = "rows") -> Iterator[tuple[Case, Any]]:
    """Cases, and their rows."""
    for case in CASES:
        if (one := found.get(rows, {}).get(" ".join(keys(case)))) is not None:
            yield case, one


def cells_of(a: float, b: float, difference: Sequence[float], digits: int) -> list[str]:
    """Both means, and their difference with its interval."""
    mean, low, high = difference
    return [f"{a:.{digits}f} / {b:.{digits}f}", f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"]


def of_draws(runs: dict[str, Any]) -> str:
    """The table of what is on file of both sides."""
    found = []
    for case in CASES:
        pairs = [tuple(runs.get(f"{key} draw {draw}") for key in keys(case)) for draw in DRAWS]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not both:
            continue
        cells, said = [], []
        for kind, digits in KINDS.items():
            a, b = (np.array([side[kind] for side in sides]) for sides in zip(*both, strict=True))
            difference = interval(a - b)
            cells += cells_of(a.mean(), b.mean(), difference, digits)
            said.append(verdict(*difference[1:]))
        found.append((case.form, name_of(case.sample), case.ours, str(len(both)), *cells, *said))
    head = ("form", "sample", "mmqc and peer", "draws", "NLL", "difference", "KL", "difference", "by NLL mmqc is", "by KL")
    return table(head, found)


def of_orders(found: dict[str, Any], rows: str = "rows") -> str:
    """The table of what orders.py has on file, and how often mmqc is what."""
    lines, said = [], []
    for case, one in on_file(found, rows):
        cells = []
        for kind, digits in KINDS.items():
            row = one[kind]
            less = sum(a < b for a, b in zip(row["mmqc"], row["peer"], strict=True))
            cells += cells_of(np.mean(row["mmqc"]), np.mean(row["peer"]), row["difference"], digits)
            cells.append(f"{less} of {len(row['mmqc'])}")
            said.append(row["mmqc is"])
        spread = " / ".join(f"{min(one['kl'][side]):.4f} to {max(one['kl'][side]):.4f}" for side in ("mmqc", "peer"))
        median = " / ".join(f"{one['median KL'][side]:.1e}" for side in ("mmqc", "peer"))
        lost = " / ".join(str(sum(one["lost"][side])) for side in ("mmqc", "peer"))
        lines.append((case.form, case.ours, *cells, spread, median, lost, *said[-2:]))
    head = ("form", "mmqc and peer", "NLL", "difference", "less", "KL", "difference", "less", "KL of the orders",
            "median KL", f"KL over {LOST}: questions", "by NLL mmqc is", "by KL")  # fmt: skip
    counts = ", ".join(f"{said.count(word)} {word}" for word in ("better", "tie", "worse"))
    return f"{counts} of {len(said)} intervals:\n\n{table(head, lines)}"


def row(run: dict[str, list[float]], peer: dict[str, list[float]]) -> dict[str, Any]:
    """Means, differences to the peer with their intervals, and verdicts."""
    found = {}
    for kind in KINDS:
        difference = bootstrap(np.subtract(run[kind], peer[kind]))
        found[kind] = {
            "mean": float(f"{np.mean(run[kind]):.4g}"),
            "difference": [float(f"{v:.3g}") for v in (difference.mean, difference.low, difference.high)],
            "mmqc is": verdict(difference.low, difference.high),
        }
    return found


def of_case(case: Case, runs: dict[str, Any]) -> dict[str, Any] | None:
    """A row of what is on file of both sides."""
    ours, theirs = (runs.get(key) for key in keys(case))
    return None if ours is None or theirs is None else row(ours, theirs)


def of_again(first: dict[str, Any], again: dict[str, Any]) -> str:
    """What stays, and the rows in which a verdict is another one."""
    changed, said, alike, count = [], [], Counter[str](), Counter[str]()
    for case in CASES:
        name = " ".join(keys(case))
        then, now = of_case(case, first), again.get("rows", {}).get(name)
        if then is None or now is None:
            continue
        count[case.ours] += 1
        alike[case.ours] += all(abs(then[kind]["mean"] - now[kind]["mean"]) <= 1e-3 * abs(then[kind]["mean"]) for kind in KINDS)
        said += [now[kind]["mmqc is"] for kind in KINDS]
        for kind, digits in KINDS.items():
            a, b = then[kind], now[kind]
            if a["mmqc is"] != b["mmqc is"]:
                means = [f"{side['mean']:.{digits}f}" for side in (a, b)]
                words = [side["mmqc is"] for side in (a, b)]
                changed.append((case.form, name_of(case.sample), case.ours, kind.upper(), *means, *words))
    head = ("form", "sample", "mmqc", "", "then", "again", "then mmqc was", "and is")
    stamp = ", ".join(f"{key} {value}" for key, value in again.get("about", {}).items())
    same = ", ".join(f"{alike[ours]} of {number} of {ours}" for ours, number in count.items())
    return f"""mmqc's side of {count.total()} rows was measured again on another machine ({stamp}). NLL and KL are the same to
three digits in {same}: codes follow the order of sums. {said.count("worse")} of {len(said)} intervals say worse there,
{said.count("better")} better. Verdicts that are others:

{table(head, changed)}"""


def of_questions(found: dict[str, Any]) -> str:
    """The table, and how often mmqc is what."""
    lines, said = [], []
    for case, one in on_file(found):
        cells = []
        for kind, digits in KINDS.items():
            cells += cells_of(one[kind]["mean"], one["peer"][kind], one[kind]["difference"], digits)
            said.append(one[kind]["mmqc is"])
        sides = [one["spread of KL"][side] for side in ("mmqc", "peer")]
        cells.append(" / ".join(f"{side['median']:.1e}" for side in sides))
        cells.append(" / ".join(f"{side['share of few']:.0%}" for side in sides))
        cells.append(" / ".join(of_kinds(side["lost, by kind"]) for side in sides))
        lines.append((case.form, case.ours, *cells, *said[-2:]))
    head = ("form", "mmqc and peer", "NLL", "difference", "KL", "difference", "median KL", "in 1 % of questions",
            f"KL over {LOST}: questions by kind", "by NLL mmqc is", "by KL")  # fmt: skip
    counts = ", ".join(f"{said.count(word)} {word}" for word in ("better", "tie", "worse"))
    return f"""Digits, {len(lines)} rows, {found.get("questions", 0):,} questions behind those of the page ({counts} of {len(said)}
intervals; `python -m benchmarks.peers.questions`):

{table(head, lines)}"""


def of_asymmetric(first: dict[str, Any], found: dict[str, Any]) -> str:
    """The table of what asymmetric.py has on file beside both sides of the page, and what its intervals and medians say."""
    lines, said, medians = [], [], []
    runs = found.get("runs", {})
    for case in nearest():
        ours, theirs = keys(case)
        if ours not in runs:
            continue
        sides = first[ours], runs[ours], first[theirs]
        cells = [" / ".join(f"{np.mean(side[kind]):.{digits}f}" for side in sides) for kind, digits in KINDS.items()]
        middle = [float(np.median(side["kl"])) for side in sides]
        medians.append(middle)
        words = []
        for other in (sides[0], sides[2]):
            for kind in KINDS:
                difference = bootstrap(np.subtract(sides[1][kind], other[kind]))
                words.append(verdict(difference.low, difference.high))
        said.append(words)
        methods = case.ours, case.peer.removeprefix("llmcompressor ")
        lines.append((case.form, name_of(case.sample), *methods, *cells, " / ".join(f"{m:.1e}" for m in middle), *words))
    head = ("form", "sample", "mmqc", "peer", "NLL: quantized / asymmetric / peer", "KL", "median KL", "by NLL, beside quantized",
            "by KL", "by NLL, beside the peer", "by KL")  # fmt: skip
    counts = [
        ", ".join(f"{sum(words[i : i + 2].count(word) for words in said)} {word}" for word in ("better", "tie", "worse"))
        for i in (0, 2)
    ]
    quantized, asymmetric, peer = np.log(np.maximum(medians, TINY)).mean(0)
    times = [np.exp(other) for other in (asymmetric - quantized, asymmetric - peer, quantized - peer)]
    return f"""Of {2 * len(said)} intervals beside quantized inputs {counts[0]}; beside the peer {counts[1]}.
The median KL, geometric mean over rows, is {times[0]:.2f} of that with quantized inputs, and {times[1]:.2f} of the peer's (which
with quantized inputs it is {times[2]:.2f} of):

{table(head, lines)}"""


def of_kinds(lost: dict[str, int]) -> str:
    """In words."""
    return ", ".join(f"{number} {kind}" for kind, number in lost.items()) or "0"


def of_errors(found: dict[str, Any]) -> str:
    """A sentence for each sample."""
    return " ".join(
        f"on {name} the error of a linear's output is {row['mmqc'][0]:.2f} of the peer's on the batches that were read, and "
        f"{row['mmqc'][1]:.2f} on others (geometric mean, GPTQ in 2 bits, `python -m benchmarks.peers.held_out`)."
        for name, row in found.get(ERRORS, {}).items()
    )
