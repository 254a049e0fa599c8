"""The zero point that loses least: by brute force, never worse than the one in the middle, and always a code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

from mmqc.solvers.grid import Grid
from mmqc.solvers.mse_clip import NORM, SHRINKS
from mmqc.solvers.zero_point import best_zero


def groups(n, g, seed, shift=0.0):
    r = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, g, generator=r, dtype=torch.float64) + shift, torch.rand(3, g, generator=r, dtype=torch.float64) + 0.1


def lost(w, grid, cost):
    error = (grid.values(grid.codes(w)) - w).abs().pow(NORM)
    return (error * cost).sum(-1)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 3, 4]), shift=st.sampled_from([-3.0, -0.3, 0.0, 0.3, 3.0]))
def test_best_zero__is_the_best_of_all_that_are_tried(seed, bits, shift):
    w, cost = groups(4, 8, seed, shift)
    widest = Grid.of(w, bits, symmetric=False)
    found = best_zero(w, widest, cost)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert found.zero.min() >= low
    assert found.zero.max() <= high
    least = torch.full(w.shape[:2], torch.inf, dtype=torch.float64)
    for moved in (0, -1, 1):
        zero = (widest.zero + moved).clamp(low, high)
        ends = w.amax(-1, keepdim=True).clamp(min=0) / (high - zero), -w.amin(-1, keepdim=True).clamp(max=0) / (zero - low)
        reach = torch.maximum(*(end.nan_to_num(0, 0, 0) for end in ends)) if moved else widest.scale.double()
        for p in SHRINKS:
            least = torch.minimum(least, lost(w, Grid((reach * p).clamp(min=1e-9), bits, zero.double()), cost))
    assert_close(lost(w, found, cost), least, torch.float32)


def test_best_zero__gives_the_longer_end_to_the_side_that_needs_it():
    w = torch.tensor([[[-2.0, -1.0, 0.0, 1.0, 1.02, 0.0, -2.0, -2.04]]])
    grid = best_zero(w, Grid(torch.full((1, 1, 1), 1.0), 2, torch.full((1, 1, 1), -1.0)), torch.ones(1, 8))
    assert grid.zero.item() == 0  # -2, -1, 0, 1 and not -1, 0, 1, 2
    assert (grid.values(grid.codes(w)) - w).abs().max() < 0.05


@pytest.mark.parametrize("sign", [-1, 1])
def test_best_zero__of_one_sign_and_of_nothing(sign):
    w = sign * torch.rand(5, 3, 8, generator=torch.Generator().manual_seed(0))
    w[0] = 0
    grid = best_zero(w, Grid.of(w, 2, symmetric=False), torch.ones(3, 8))
    assert torch.isfinite(grid.values(grid.codes(w))).all()
    assert (grid.codes(w)[0] == grid.zero[0]).all()
    assert best_zero(w[:0], Grid.of(w[:0], 2, symmetric=False), torch.ones(3, 8)).scale.shape == (0, 3, 1)
