"""A step with and without its recording, by turns in one process: what the host costs between two tokens.

    python -m benchmarks.end_to_end.whole_steps [--way w4a8] [--rows 1 16] [--dry] --out results.json

Qwen2-VL-7B's shape with random weights through ``generate`` and ``mmqc.compiled_loop``, an image of 1,024 patches for each prompt;
milliseconds of a step, the fastest of five pairs of calls, two turns.  ``--dry``: a small model on the CPU, where nothing is
recorded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from unittest import mock

from benchmarks.end_to_end.any_size import EACH, Way
from benchmarks.end_to_end.cold_start import CONFIGS
from benchmarks.gpu_run import Run, facts
from mmqc.compiler.step_replay import StepReplays


def main() -> None:
    """One way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", default="w4a8", choices=[*CONFIGS, "bf16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    way, steps = Way(args.way, args.dry), dict[str, list[float]]()
    for rows in args.rows:
        inputs = way.prompt(EACH, rows)
        for name in ("plain", "recorded") * 2:
            begin = StepReplays.begin if name == "recorded" else lambda *_: None
            with mock.patch.object(StepReplays, "begin", begin):
                steps.setdefault(f"{rows} {name}", []).append(round(1e3 * way.step(inputs), 4))
            print(rows, name, steps[f"{rows} {name}"][-1], flush=True)
            args.out.write_text(json.dumps({**facts(Run(args.dry, 0)), "milliseconds of a step": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
