"""The rows in which mmqc was worse, on other draws of calibration: whether it is the method, or the batches that were read.

    python -m benchmarks.peers.draws [--sides mmqc peers]          what is not on file; compare.py draws the table

An interval over questions of one draw says nothing of others.  Draws that were not looked at when a row was chosen have no bias
from that choice; the interval is of a bootstrap over draws and questions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import compare
from benchmarks.peers.cases import CASES, Case, keys, name_of
from benchmarks.peers.compare import CALIBRATION, QUESTIONS, ROOT, SIDES, ours, rows, theirs, worse
from benchmarks.peers.drawn import DRAWS, OF_DRAWS, read
from benchmarks.peers.export import export
from examples.studies.study import about


def chosen(runs: dict[str, Any]) -> list[Case]:
    """Of the same method on both sides, where mmqc is worse on the page."""
    named = worse(rows(runs))
    return [c for c in CASES if (name_of(c.sample), c.form, c.ours, c.peer) in named and c.peer == f"llmcompressor {c.ours}"]


def main() -> None:
    """Measure what is not on file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--data", type=Path, default=ROOT / "build/peers/draws")
    parser.add_argument("--environments", type=Path, default=ROOT / "build/peers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for draw in DRAWS:
        for case in chosen(json.loads(compare.RESULTS.read_text(encoding="utf-8"))["runs"]):
            data = options.data / str(draw)
            for library, key in zip(SIDES, keys(case), strict=True):
                name = f"{key} draw {draw}"
                if library not in options.sides or name in read(OF_DRAWS).get("runs", {}):
                    continue
                export(case.sample, data / case.sample, CALIBRATION, QUESTIONS, draw)
                run = ours(case, data, draw=draw) if library == "mmqc" else theirs(case, data, options.environments)
                found = read(OF_DRAWS)  # the other side's may be measured at the same time
                found.setdefault("runs", {})[name] = {
                    kind: [float(f"{value:.4g}") for value in values] for kind, values in run.items()
                }
                found |= about("python -m benchmarks.peers.draws")
                OF_DRAWS.write_text(json.dumps(found) + "\n")
                print(name, {kind: round(float(np.mean(values)), 5) for kind, values in run.items()}, flush=True)


if __name__ == "__main__":
    main()
