"""Tokens a second of batches of text through ``generate`` and ``mmqc.compiled_loop``, each way in a process of its own.

    python -m benchmarks.end_to_end.decode_batches [--ways w4a8 bf16] [--rows 16 64 128 256] [--dry] --out results.json

Qwen2-VL-7B's shape with random weights, prompts of 300 tokens; of each number of rows the fastest of five pairs of calls.
``--dry``: a small model on the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.end_to_end.any_size import Way
from benchmarks.end_to_end.cold_start import CONFIGS
from benchmarks.gpu_run import Run, facts

TOKENS = 300


def measure(name: str, rows: list[int], dry: bool) -> Iterator[tuple[str, float]]:
    """Tokens a second by rows."""
    way = Way(name, dry)
    for n in rows:
        ids = torch.randint(100, 500, (n, TOKENS // (10 if dry else 1)), device=way.calls.model.device)
        found = round(n / way.step({"input_ids": ids, "attention_mask": torch.ones_like(ids)}), 1)
        print(name, n, found, flush=True)
        yield str(n), found


def main() -> None:
    """Every way in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["w4a8", "bf16"], choices=[*CONFIGS, "bf16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--alone", action="store_true", help="the first way, in this process")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = dict[str, dict[str, float]]()

    def write() -> None:
        result = {**facts(Run(args.dry, 0)), "tokens of a prompt": TOKENS, "tokens a second, by way and rows": found}
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    for name in args.ways:
        if args.alone:
            found[name] = {}
            for rows, value in measure(name, args.rows, args.dry):
                found[name][rows] = value
                write()
            continue
        part = args.out.with_suffix(f".{name}.json")
        words = ["--ways", name, "--rows", *map(str, args.rows), *["--dry"] * args.dry, "--alone", "--out", str(part)]
        subprocess.run([sys.executable, "-m", "benchmarks.end_to_end.decode_batches", *words], check=True)
        found |= json.loads(part.read_text())["tokens a second, by way and rows"]
        part.unlink()
        write()


if __name__ == "__main__":
    main()
