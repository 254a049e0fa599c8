"""How far figures move with the batches that are read: GPTQ by mmqc, as it is and as LLM Compressor's algorithm.

    python -m benchmarks.peers.spread                   both, on every sample and number of batches that is not on file

The peer's algorithm is one sweep on its own step, 2 max|w| / (2^b - 1), without a search for clips and without descent: in the
first block's queries, keys and values mmqc then makes 99.9 % of the peer's codes.  ``compare.py`` draws the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.peers.cases import SAMPLES, Case
from benchmarks.peers.compare import CALIBRATION, QUESTIONS, RESULTS, ROOT, ours
from benchmarks.peers.export import export
from mmqc.solvers import gptq

BITS, GROUP = 2, 32
BATCHES = {"digits-vqa": (64, 60, 56, 52, 48), "digits-vqa-stress": (64, 56, 48)}
WAYS = ("mmqc", "one sweep on the peer's step")


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
    for sample in SAMPLES:
        export(sample, data / sample, CALIBRATION, QUESTIONS)
        for batches in BATCHES[sample]:
            for way in WAYS:
                found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
                spread, key = found.setdefault("spread", {}), f"{sample} {batches} {way}"
                if key in spread:
                    continue
                case = Case(sample, "gptq", "llmcompressor gptq", BITS, GROUP, symmetric=True)
                if way == WAYS[0]:
                    run = ours(case, data, batches)
                else:
                    with as_the_peer():
                        run = ours(case, data, batches)
                spread[key] = {measured: float(f"{np.mean(values):.4g}") for measured, values in run.items()}
                print(key, spread[key], flush=True)
                RESULTS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.exit(main())
