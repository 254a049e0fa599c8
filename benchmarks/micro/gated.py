"""Gate and up of many rows to codes or numbers, one launch (pingpong_gated.py), by tile, on one GPU.

    python -m benchmarks.micro.gated --out benchmarks/results/gated.json

Microseconds of a launch, the least and the median of three turns: CUDA graphs of ten, replayed for a tenth of a second, by turns,
for a product of this size is bound by the device's power, and what ran before it tells.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_run import Run, arguments, facts
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.kernels.warpgroup import pingpong_gated as gated

SHAPES = [(m, 18944, 3584) for m in (600, 1024, 2048, 6417)] + [(4096, 14336, 4096), (8192, 8960, 1536)]
IN_NUMBERS = [(1024, 18944, 3584), (6417, 18944, 3584)]  # bf16: a transform follows
TILES = {
    "128 x (64 + 64)": gated.TILE,
    "64 x (128 + 128)": gated.WIDE,
    "128 x (128 + 128), one consumer": MatmulConfig(128, 256, 128, 8, 8, split_k=4, variant="pingpong"),
    "256 x (64 + 64), one consumer": MatmulConfig(256, 128, 128, 8, 8, split_k=4, variant="pingpong"),
}
EACH, TURNS, SECONDS = 10, 3, 0.12


def launch(run: Run, m: int, n: int, k: int, dtype: torch.dtype, tile: MatmulConfig) -> Callable[[], None]:
    """Of new operands."""
    x, weights = (torch.randint(-128, 128, s, dtype=torch.int8, device=run.device) for s in ((m, k), (2, n, k)))
    y, one = torch.empty(m, n, dtype=dtype, device=run.device), row_scale(torch.ones(1, device=run.device) / 100, m)
    linears = [Linear(w, torch.rand(n, device=run.device) / 2e4, None, y) for w in weights]
    epilogue = Epilogue("silu", run.dtype, one if dtype == torch.int8 else None)
    return gated.launch(x, linears, one, tile, epilogue).run


def by_turns(works: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """[Least, median] microseconds."""
    graphs, found = {}, {name: list[float]() for name in works}
    for name, work in works.items():
        work()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(EACH):
                work()
    for name, graph in (pair for _ in range(TURNS) for pair in graphs.items()):
        found[name].append(replayed(graph, max(2, int(SECONDS / replayed(graph, 1)))))
    return {name: [round(1e6 * of(times) / EACH, 1) for of in (min, statistics.median)] for name, times in found.items()}


def replayed(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Seconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def main() -> None:
    """Time and write."""
    options = arguments(__doc__, 100).parse_args()
    run, times = Run(options.dry, options.seconds), dict[str, Any]()
    for dtype, shapes in ((torch.int8, SHAPES), (run.dtype, IN_NUMBERS)):
        for m, n, k in [] if options.dry else shapes:
            name = f"{m} x {n} x {k}, {'codes' if dtype == torch.int8 else 'bf16'}"
            works = {tile: launch(run, m, n, k, dtype, c) for tile, c in TILES.items()}
            times[name] = run.attempt(name, lambda works=works: by_turns(works))
            print(name, times[name], flush=True)
    if options.out:
        options.out.write_text(json.dumps({**facts(run), "times_us": times, "failures": run.failures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
