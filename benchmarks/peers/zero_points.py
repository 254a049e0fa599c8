"""What zero points on the codes, between them, and the search of both ends leave of weights: the sum of squared errors.

    python -m benchmarks.peers.zero_points docs-vqa 2 32          SAMPLE BITS GROUP: the linears of its language model

Prints a line a way, with the seconds that one thread takes; nothing is calibrated and no question asked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torchao.quantization.granularity import PerGroup

import mmqc
from mmqc.config import WeightSpec
from mmqc.solvers import solve
from mmqc.solvers.grid import Grid, grouped, on_grid
from mmqc.solvers.mse_clip import ENDS, NORM
from mmqc.solvers.quantized import Quantized


def ways(bits: int, group: int) -> dict[str, Callable[[Tensor], Quantized]]:
    """How a weight is rounded, by name."""
    spec = partial(WeightSpec, bits, PerGroup(group), symmetric=False)
    found = {
        f"{solver}, zero {where}": spec(solver=solver, zero_point=kind)
        for kind, where in (("int", "on a code"), ("float", "between codes"))
        for solver in ("rtn", "mse_clip")
    }
    return {name: partial(solve, spec=of) for name, of in found.items()} | {
        "every pair of ends, zero between codes": partial(every_pair, bits=bits, group=group)
    }


def every_pair(w: Tensor, bits: int, group: int) -> Quantized:
    """The best of all 196 pairs of ends, of which solvers/both_ends.py tries 57."""
    groups = grouped(w, group)
    mean = groups.mean(-1, keepdim=True)
    low, high = groups.amin(-1, keepdim=True) - mean, groups.amax(-1, keepdim=True) - mean
    grids = (Grid.between(mean + a * low, mean + b * high, bits) for a in ENDS for b in ENDS)
    best, least = next(grids), torch.full_like(mean, torch.inf)
    for grid in (best, *grids):
        error = (grid.values(grid.codes(groups)) - groups).abs().pow(NORM).sum(-1, keepdim=True)
        assert grid.zero is not None
        assert best.zero is not None
        scale, zero = (torch.where(error < least, *pair) for pair in ((grid.scale, best.scale), (grid.zero, best.zero)))
        best, least = Grid(scale, bits, zero), torch.minimum(error, least)
    return on_grid(groups, best, w.shape[1], group)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    model = mmqc.samples.load(sys.argv[1]).model
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "visual" not in n and n != "lm_head"}
    for name, rounded in ways(int(sys.argv[2]), int(sys.argv[3])).items():
        start, lost = time.perf_counter(), 0.0
        for linear in linears.values():
            w = linear.weight.detach().float()
            lost += float((rounded(w).dequantize() - w).double().square().sum())
        print(f"{name:40} {lost:9.1f} {time.perf_counter() - start:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
