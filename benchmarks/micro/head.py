"""The output head of some models on one GPU, in 8 bits a row: the tile that is chosen, and others.

    python -m benchmarks.micro.head --out benchmarks/results/head_tiles.json

Microseconds; a head is larger than the L2 cache, so one copy of it is enough.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from benchmarks.gpu_run import Run, arguments, facts
from mmqc.kernels.matmul.configs import MatmulConfig as Tile
from mmqc.kernels.matmul.configs import config
from mmqc.kernels.matmul.weight_only_matmul import weight_only_matmul

SHAPES = {"Qwen2-VL-7B": (152064, 3584), "Qwen2-VL-72B": (152064, 8192), "InternVL2.5-8B": (92553, 4096)}
ROWS = (1, 16, 64)
TILES = ((64, 128, 4, 4), (64, 128, 4, 3), (32, 256, 2, 3), (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3), (128, 128, 4, 3))


def time_head(run: Run, n: int, k: int, m: int) -> dict[str, float]:
    """Of every tile, and of None: what a user gets."""
    x = torch.randn(m, k, device=run.device).to(run.dtype)
    w, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=run.device), torch.rand(n, 1, device=run.device) * 0.01
    y = torch.empty(m, n, dtype=run.dtype, device=run.device)
    block_m = 8 if m <= 8 else 16 if m <= 16 else 64
    tries: dict[str, Tile | None] = {"mmqc": None}
    tries |= {str(tile): Tile(block_m, *tile, variant="columns") for tile in TILES}
    found = {}
    for name, tile in tries.items():

        def call(tile: Tile | None = tile) -> Any:
            return weight_only_matmul(x, w, scale, group_size=k, out=y, config=tile)

        us = run.attempt(f"{n}x{k}/{m} {name}", lambda call=call: run.microseconds([call], replays=9, budget=0.03))
        if us is not None:
            found[name] = round(us, 1)
    return found


def main() -> None:
    """Time and write."""
    options = arguments(__doc__, 120).parse_args()
    run = Run(options.dry, options.seconds)
    shapes = {"dry": (96, 64)} if options.dry else SHAPES
    for name, (n, k) in shapes.items():
        for m in ROWS:
            run.times[f"{name}/{m}"] = time_head(run, n, k, m)
            print(name, m, config("weight_int8", m, n, k, run.device), run.times[f"{name}/{m}"], flush=True)
    if options.out:
        result = {**facts(run), "shapes": shapes, "times_us": run.times, "failures": run.failures}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
