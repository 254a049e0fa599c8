"""The search of both ends: near the best of all pairs, never worse than the widest grid, whatever the weights are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqc.solvers import clip
from mmqc.solvers.both_ends import best_ends
from mmqc.solvers.grid import Grid

PARTS = tuple(1 - step / 20 for step in range(14))


def power(error: torch.Tensor) -> torch.Tensor:
    return error.abs().pow(2.4).sum(-1)


def groups(seed: int, shift: float = 0.0, g: int = 24) -> torch.Tensor:
    r = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 2, g, generator=r, dtype=torch.float64)
    return w * torch.rand(3, 2, 1, generator=r, dtype=torch.float64).exp() + w.relu().square() * 0.5 + shift


def lost(w: torch.Tensor, grid: Grid) -> torch.Tensor:
    return power(grid.values(grid.codes(w)) - w)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 3, 4]), shift=st.sampled_from([-5.0, -0.3, 0.0, 0.3, 5.0]))
def test_best_ends__near_the_best_of_all_pairs_and_never_above_the_widest(seed, bits, shift):
    w = groups(seed, shift)
    widest = Grid.of(w, bits, symmetric=False, float_zero=True)
    found = lost(w, best_ends(w, widest, PARTS, power))
    assert (found <= lost(w, widest) * (1 + 1e-4)).all()
    mean = w.mean(-1, keepdim=True)
    low, high = w.amin(-1, keepdim=True) - mean, w.amax(-1, keepdim=True) - mean
    pairs = [lost(w, Grid.between(mean + a * low, mean + b * high, bits)) for a in PARTS[::2] for b in PARTS[::2]]
    assert (found <= torch.stack(pairs).amin(0) * (1 + 1e-4)).all()


def test_best_ends__what_is_on_the_grid_stays():
    codes = torch.randint(0, 4, (4, 3, 30), generator=torch.Generator().manual_seed(0)).double()
    codes[..., 0], codes[..., 1] = 0, 3
    w = codes * 0.25 - 0.375  # zero lies halfway between two codes
    grid = best_ends(w, Grid.of(w, 2, symmetric=False, float_zero=True), PARTS, power)
    assert torch.equal(grid.codes(w) + 2, codes)
    assert (grid.zero == -0.5).all()
    assert torch.equal(grid.values(grid.codes(w)), w)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_best_ends__magnitude_does_not_matter(magnitude):
    w = groups(3).float()
    one, other = (best_ends(v, Grid.of(v, 3, False, True), PARTS, power) for v in (w, w * magnitude))
    assert (one.codes(w) != other.codes(w * magnitude)).double().mean() < 0.01


def test_best_ends__of_one_value_of_nothing_and_of_no_rows():
    w = torch.full((2, 3, 8), 0.02)
    w[1] = 0
    grid = best_ends(w, Grid.of(w, 2, False, True), PARTS, power)
    values = grid.values(grid.codes(w))
    assert torch.isfinite(values).all()
    assert (values[0] - 0.02).abs().max() <= 0.02 / 1024
    assert (values[1] == 0).all()
    assert best_ends(w[:0], Grid.of(w[:0], 2, False, True), PARTS, power).scale.shape == (0, 3, 1)


def test_best_ends__blocks_of_rows_change_nothing(monkeypatch):
    w = torch.randn(9, 1, 33, generator=torch.Generator().manual_seed(3))
    widest = Grid.of(w, 4, False, True)
    whole = best_ends(w, widest, PARTS, power)
    monkeypatch.setattr(clip, "BLOCK", 70)
    parts = best_ends(w, widest, PARTS, power)
    assert torch.equal(parts.scale, whole.scale)
    assert torch.equal(parts.zero, whole.zero)
