"""mmqc's side of the comparison once more, with the peers' from the file: which of its verdicts another machine would change.

    python -m benchmarks.peers.again [--measured peers.json]        measures, or takes what another run of compare has on file

GPTQ's codes depend on the order of sums, so on the CPU.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.cases import CASES, Case, keys, name_of, verdict
from examples.studies.study import about, table
from mmqc.samples.scoring import bootstrap

RESULTS = Path(__file__).resolve().parents[1] / "results/peer_again.json"
KINDS = {"nll": 4, "kl": 5}


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


def text(first: dict[str, Any], again: dict[str, Any]) -> str:
    """What stays, and the rows in which a verdict is another one."""
    changed, said, alike, count = [], [], Counter[str](), Counter[str]()
    for case in CASES:
        name = " ".join(keys(case))
        then, now = of_case(case, first), again["rows"].get(name)
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


def main() -> None:
    """Measure, or take; and write."""
    from benchmarks.peers import compare

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, help="a file of compare's, measured elsewhere")
    parser.add_argument("--data", type=Path, default=compare.ROOT / "build/peers/data", help="where exported models go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads(compare.RESULTS.read_text(encoding="utf-8"))["runs"]
    elsewhere = json.loads(options.measured.read_text(encoding="utf-8")) if options.measured else None
    stamp = about("python -m benchmarks.peers.again") if elsewhere is None else elsewhere["about"]
    found: dict[str, Any] = {"about": stamp, "rows": {}}
    measured: dict[str, Any] = {} if elsewhere is None else elsewhere["runs"]
    for case in CASES:
        ours, theirs = keys(case)
        if theirs not in runs or (elsewhere is not None and ours not in measured):
            continue
        if ours not in measured:
            compare.export(case.sample, options.data / case.sample, compare.CALIBRATION, compare.QUESTIONS)
            measured[ours] = compare.ours(case, options.data)
        found["rows"][f"{ours} {theirs}"] = row(measured[ours], runs[theirs])
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
