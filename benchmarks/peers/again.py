"""mmqc's side of the comparison once more, with the peers' from the file: which of its verdicts another machine would change.

    python -m benchmarks.peers.again [--measured peers.json]        measures, or takes what another run of compare has on file

GPTQ's codes depend on the order of sums, so on the CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import compare
from benchmarks.peers.cases import CASES, keys
from benchmarks.peers.drawn import OF_AGAIN, row
from examples.studies.study import about


def main() -> None:
    """Measure, or take; and write."""
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
        OF_AGAIN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
