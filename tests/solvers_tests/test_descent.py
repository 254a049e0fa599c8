"""Descent on the output's error: never up, equal to plain coordinate descent, and better than the sweep that it starts from."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close
from torchao.quantization.granularity import PerGroup, PerRow

from mmqc.config import WeightSpec
from mmqc.solvers import descent, gptq
from mmqc.solvers.grid import Grid, grouped
from mmqc.solvers.quantized import Quantized


def problem(n, k, seed):
    """A weight and the second moment of correlated inputs, float64."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * k, k, generator=g, dtype=torch.float64) @ torch.randn(k, k, generator=g, dtype=torch.float64)
    return torch.randn(n, k, generator=g, dtype=torch.float64), x.T @ x + torch.diag(x.square().sum(0))


def loss(w, q, h):
    d = q.dequantize().double() - w
    return ((d @ h) * d).sum().item()


def start(w, bits, group, symmetric):
    """Round to nearest on the widest grid."""
    groups = grouped(w, group)
    grid = Grid.of(groups, bits, symmetric)
    return grid.codes(groups).to(torch.int8).flatten(1)[:, : w.shape[1]], grid


def lost(w, h, codes, grid, group):
    zero = None if grid.zero is None else grid.zero[..., 0]
    scale = grid.scale[..., 0]
    part = Quantized(codes, scale if group else scale[:, 0], zero=zero if group or zero is None else zero[:, 0], group_size=group)
    d = part.dequantize().double() - w
    return ((d @ h) * d).sum(1)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(8, 60),
    group=st.sampled_from([0, 8, 24]),
    bits=st.sampled_from([2, 3, 4]),
    symmetric=st.booleans(),
)
def test_descend__no_row_loses_more_than_before(seed, k, group, bits, symmetric):
    w, h = problem(5, k, seed)
    codes, grid = start(w, bits, group, symmetric)
    before = lost(w, h, codes, grid, group)
    for _ in range(3):
        codes, grid = descent.descend(w, h, codes, grid, group, 1)
        after = lost(w, h, codes, grid, group)
        assert (after <= before * (1 + 1e-5)).all()
        before = after
    assert codes.min() >= -(2 ** (bits - 1))
    assert codes.max() <= 2 ** (bits - 1) - 1


def textbook(w, h, codes, grid, group):
    """One round by hand: every code in turn, with the whole gradient computed anew, then its group's scale."""
    codes, scale = codes.double(), grid.scale[..., 0].double()
    zero = torch.zeros_like(scale) if grid.zero is None else grid.zero[..., 0].double()
    low, high = -(2 ** (grid.bits - 1)), 2 ** (grid.bits - 1) - 1
    width = group or w.shape[1]
    of = torch.arange(w.shape[1]) // width
    for g in range(scale.shape[1]):
        inside = (of == g).nonzero()[:, 0]
        for i in inside.tolist():
            d = (codes - zero[:, of]) * scale[:, of] - w
            best = (codes[:, i] - zero[:, g]) * scale[:, g] - (d @ h)[:, i] / h[i, i]
            codes[:, i] = ((best / scale[:, g]).round() + zero[:, g]).clamp(low, high)
        d = (codes - zero[:, of]) * scale[:, of] - w
        c = torch.zeros_like(w)
        c[:, inside] = codes[:, inside] - zero[:, g, None]
        wanted = scale[:, g] - ((d @ h) * c).sum(1) / ((c @ h) * c).sum(1)
        near = (wanted > scale[:, g] / descent.FARTHEST) & (wanted < scale[:, g] * descent.FARTHEST)
        scale[:, g] = torch.where(near, wanted, scale[:, g]).float()
    return codes, scale


@pytest.mark.parametrize(("block", "panel"), [(1, 0), (5, 17), (128, 0), (4, 35)])
@pytest.mark.parametrize(("bits", "group", "symmetric"), [(2, 16, True), (3, 0, False), (4, 7, False)])
def test_descend__equals_coordinate_descent_by_hand(bits, group, symmetric, block, panel, monkeypatch):
    monkeypatch.setattr(descent, "BLOCK", block)
    monkeypatch.setattr(descent, "PANELS", {"cpu": panel})
    w, h = problem(6, 40, seed=3)
    codes, grid = start(w, bits, group, symmetric)
    found, better = descent.descend(w, h, codes, grid, group, 1)
    by_hand, scale = textbook(w, h, codes, grid, group)
    assert torch.equal(found.double(), by_hand)
    assert not torch.equal(found, codes)
    assert_close(better.scale[..., 0].double(), scale, torch.float32)


def test_descend__a_scale_does_not_jump():
    w, h = problem(4, 16, seed=5)
    codes, grid = start(w, 4, 0, True)
    coarse = replace(grid, scale=grid.scale * 3)
    _, after = descent.descend(w, h, codes, coarse, 0, 1)
    ratio = after.scale / coarse.scale
    assert ((ratio < descent.FARTHEST) & (ratio > 1 / descent.FARTHEST)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("granularity", [PerRow(), PerGroup(32)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq__best_loses_less_than_every_named_clip(symmetric, granularity, dtype):
    w, h = problem(24, 96, seed=6)
    spec = WeightSpec(2, granularity, "gptq", symmetric=symmetric)
    named = [loss(w, gptq.solve(w.to(dtype), replace(spec, clip=clip), h), h) for clip in ("inputs", "none")]
    assert loss(w, gptq.solve(w.to(dtype), spec, h), h) < 0.95 * min(named)
