"""Grids: codes of integer zero points as they always were, of those between the codes the nearest, for what is stored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.quantization.granularity import PerGroup, PerRow

from mmqc.config import WeightSpec
from mmqc.solvers import solve
from mmqc.solvers.grid import FARTHEST, Grid, on_grid
from mmqc.solvers.quantized import levels

SOLVERS = ["rtn", "mse_clip", "awq_clip", "gptq", "learned"]


def weights(seed: int, shift: float, g: int = 20, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    r = torch.Generator().manual_seed(seed)
    return (torch.randn(4, 3, g, generator=r, dtype=torch.float64) * 0.3 + shift).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bits=st.sampled_from([2, 3, 4, 8]),
    shift=st.floats(-2, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_grid__integer_zero_points_give_the_codes_of_the_short_formula(seed, bits, shift, dtype):
    w, (low, high) = weights(seed, shift, dtype=dtype), levels(bits)
    grid = Grid.of(w, bits, symmetric=False)
    assert torch.equal(grid.zero, grid.zero.round())
    assert torch.equal(grid.codes(w), (torch.round(w / grid.scale.to(w)) + grid.zero.to(w)).clamp(low, high))
    unit, zero = w / grid.scale.to(w), grid.zero.to(w)
    for p in (1.0, 0.7):
        assert torch.equal(grid.clipped(unit, p), torch.round(unit / p).clamp(low - zero, high - zero) * p)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 3, 4, 8]), shift=st.floats(-50, 50), p=st.sampled_from([1.0, 0.6]))
def test_grid__between_the_codes_none_is_nearer(seed, bits, shift, p):
    w, (low, high) = weights(seed, shift), levels(bits)
    grid = Grid.of(w, bits, symmetric=False, float_zero=True).shrunk(torch.full((4, 3, 1), p))
    assert grid.zero.dtype == torch.float16
    every = torch.arange(low, high + 1, dtype=w.dtype)
    values = (every - grid.zero.double()) * grid.scale.double()  # of all codes, by the stored numbers
    least = (w[..., None] - values[..., None, :]).abs().amin(-1)
    error = (grid.values(grid.codes(w)) - w).abs()
    assert (error <= least + grid.scale.double() * 1e-9).all()
    unit, shorter = w / grid.scale.double(), grid.shrunk(torch.full((4, 3, 1), 0.8))
    clipped = (shorter.values(shorter.codes(w)) - w).abs() / grid.scale.double()
    assert ((grid.clipped(unit, 0.8) - unit).abs() - clipped).abs().max() < 1e-4


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bits=st.sampled_from([2, 3, 4, 8]),
    shift=st.sampled_from([-1000.0, -3.0, -0.2, 0.0, 0.2, 3.0, 1000.0]),
    exponent=st.integers(-36, 30),
)
def test_grid__between_the_codes_the_error_is_at_most_half_a_step_and_the_step_no_longer(seed, bits, shift, exponent):
    w = weights(seed, shift) * 10.0**exponent
    on, between = Grid.of(w, bits, symmetric=False), Grid.of(w, bits, symmetric=False, float_zero=True)
    assert (between.scale <= on.scale * (1 + 1e-6)).all()
    assert between.zero.abs().max() <= FARTHEST + 2 ** (bits - 1) + 1
    error = (between.values(between.codes(w)) - w).abs()
    assert (error <= between.scale.double() * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("bits", "group", "width"), [(2, 8, 24), (3, 16, 40), (4, 0, 33)])
def test_solvers__float_zero_points_are_stored_as_the_codes_were_made(solver, bits, group, width):
    w = torch.randn(5, width, generator=torch.Generator().manual_seed(2)) + 0.4
    spec = WeightSpec(bits, PerGroup(group) if group else PerRow(), solver, symmetric=False, zero_point="float")
    q = solve(w, spec, torch.eye(width))
    assert q.zero.dtype == torch.float16
    assert q.zero.shape == q.scale.shape
    assert (q.zero.float() != q.zero.float().round()).any()
    nearest = (w / q.by_channel(q.scale) + q.by_channel(q.zero.float())).round().clamp(*levels(bits))
    assert (q.codes != nearest).double().mean() < 0.02  # with H = I every solver rounds to nearest, but for ties
    loss = {kind: (solve(w, spec_of(spec, kind), torch.eye(width)).dequantize() - w).square().sum() for kind in ("int", "float")}
    assert loss["float"] < loss["int"]


def spec_of(spec: WeightSpec, kind: str) -> WeightSpec:
    return WeightSpec(spec.bits, spec.granularity, spec.solver, symmetric=False, zero_point=kind)


@pytest.mark.parametrize("clip", ["best", "inputs", "weights", "none"])
@pytest.mark.parametrize("static", [True, False])
def test_gptq__float_zero_points_lose_no_more_than_integers_ones(clip, static):
    g = torch.Generator().manual_seed(4)
    w, x = (
        torch.randn(24, 64, generator=g),
        torch.randn(300, 64, generator=g, dtype=torch.float64) @ torch.randn(64, 64, generator=g, dtype=torch.float64),
    )
    h, lost = x.T @ x, {}
    for kind in ("int", "float"):
        spec = WeightSpec(
            2, PerGroup(16), "gptq", symmetric=False, act_order=static, static_groups=static, clip=clip, zero_point=kind
        )
        q = solve(w, spec, h)
        d = q.dequantize().double() - w
        lost[kind] = float((d @ h * d).sum())
        assert q.zero.dtype == (torch.int8 if kind == "int" else torch.float16)
    assert lost["float"] < lost["int"]


def test_solve__channels_kept_apart_and_zero_between_the_codes_is_refused():
    spec = WeightSpec(4, PerGroup(4), symmetric=False, zero_point="float")
    with pytest.raises(ValueError, match=r"q_proj keeps 1 input channels apart.*exactly 0.*zero_point='int'"):
        solve(torch.randn(3, 8), spec, skip=torch.tensor([2]), name="q_proj")


def test_on_grid__stores_integers_as_int8():
    w = weights(0, 0.1)
    assert on_grid(w, Grid.of(w, 4, False), 60, 20).zero.dtype == torch.int8
    assert on_grid(w, Grid.of(w, 4, False, True), 60, 20).zero.dtype == torch.float16
