"""How far figures move with the batches that are read: GPTQ by mmqc, as it is, as LLM Compressor's algorithm, and with text that
counts as much as images.

    python -m benchmarks.peers.spread [SAMPLE]          all ways, of every case and number of batches that is not on file

The peer's algorithm is one sweep on its own step, 2 max|w| / (2^b - 1), without a search for clips and without descent: in the
first block's queries, keys and values mmqc then makes the peer's codes but for ties.  ``compare.py`` draws the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.peers.cases import Case
from benchmarks.peers.compare import CALIBRATION, QUESTIONS, RESULTS, ROOT, ours
from benchmarks.peers.export import export
from mmqc.solvers import gptq

BITS = 2
CASES = {  # and the numbers of batches
    Case("digits-vqa", "gptq", "llmcompressor gptq", BITS, 32, symmetric=True): (64, 60, 56, 52, 48),
    Case("digits-vqa-stress", "gptq", "llmcompressor gptq", BITS, 32, symmetric=True): (64, 56, 48),
    Case("docs-vqa", "gptq", "llmcompressor gptq", BITS, 32, symmetric=True): (64,),
    Case("digits-vqa", "awq+gptq", "llmcompressor awq+gptq", BITS, 64, symmetric=True): (64, 56, 48),
    Case("digits-vqa-stress", "awq+gptq", "llmcompressor awq+gptq", BITS, 64, symmetric=True): (64, 56, 48),
}
WAYS = ("all rows alike", "one sweep on the peer's step", "text counts as much")


@contextmanager
def as_the_peer() -> Iterator[None]:
    """GPTQ as LLM Compressor has it, for symmetric weights of ``BITS``."""
    step = 2 * (2 ** (BITS - 1) - 1) / (2**BITS - 1)  # of the widest grid's
    kept = lambda w, h, codes, grid, group_size, rounds: (codes, grid)  # noqa: E731
    with patch.object(gptq, "CANDIDATES", (step,)), patch.object(gptq, "descend", kept):
        yield


def main() -> None:
    """Measure what is not on file."""
    torch.set_num_threads(1)
    data = ROOT / "build/peers/data"
    for case, numbers in CASES.items():
        if sys.argv[1:] and case.sample not in sys.argv[1:]:
            continue
        export(case.sample, data / case.sample, CALIBRATION, QUESTIONS)
        for batches, way in product(numbers, WAYS):
            found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
            about = {"sample": case.sample, "form": case.form, "mmqc": case.ours, "batches": batches, "way": way}
            if any(about.items() <= row.items() for row in found.setdefault("spread", [])):
                continue
            with as_the_peer() if way == WAYS[1] else nullcontext():
                run = ours(case, data, batches, "balanced" if way == WAYS[2] else None)
            found["spread"].append({**about, **{kind: float(f"{np.mean(values):.4g}") for kind, values in run.items()}})
            print(found["spread"][-1], flush=True)
            RESULTS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.exit(main())
