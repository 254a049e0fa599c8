"""mmqc calibrated to give what the floating-point model gives (inputs="asymmetric"), beside its quantized inputs and the peer's.

    python -m benchmarks.peers.asymmetric [--samples digits-vqa docs-vqa ...]      what is not on file

Only mmqc's side is measured; the others are compare.py's, on the same batches and questions, which also draws the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers import compare
from benchmarks.peers.cases import SAMPLES, keys, nearest
from benchmarks.peers.drawn import OF_ASYMMETRIC, read
from benchmarks.peers.export import export
from examples.studies.study import about


def main() -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", nargs="+", choices=SAMPLES, default=SAMPLES)
    parser.add_argument("--data", type=Path, default=compare.ROOT / "build/peers/data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stamp = about("python -m benchmarks.peers.asymmetric")
    for case in nearest():
        key, _ = keys(case)
        if case.sample not in options.samples or key in read(OF_ASYMMETRIC).get("runs", {}):
            continue
        export(case.sample, options.data / case.sample, compare.CALIBRATION, compare.QUESTIONS)
        run = compare.ours(case, options.data, inputs="asymmetric")
        print(key, {measured: round(float(np.mean(values)), 5) for measured, values in run.items()}, flush=True)
        found = read(OF_ASYMMETRIC) | stamp  # another process may measure other samples
        found.setdefault("runs", {})[key] = {kind: [float(f"{value:.4g}") for value in values] for kind, values in run.items()}
        OF_ASYMMETRIC.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
