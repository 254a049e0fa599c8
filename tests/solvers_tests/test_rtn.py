"""Rounding to nearest: equal to a loop over rows, bounded by half a step, and exact on its own grid."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close
from torchao.quantization.granularity import PerGroup
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

from mmqc.config import WeightSpec
from mmqc.solvers import solve
from mmqc.solvers.rtn import solve as solve_rtn


def by_hand(row, bits):
    """One row at a time, with Python floats; of 8 bits, by the first step."""
    row, top = row.tolist(), 2 ** (bits - 1) - 1
    largest, ends = max(abs(v) for v in row), (max(row) / top, -min(row) / (top + 1))
    found = []
    steps = (largest / top, 2 * largest / (2 * top + 1) * (1 + 2**-20), max(ends), largest / (top + 1))
    for i, step in enumerate(steps[: {2: 4, 8: 1}.get(bits, 3)]):
        codes = [max(-top - 1, min(top, round(v / step))) for v in row]
        found.append((sum((v - step * q) ** 2 for v, q in zip(row, codes, strict=True)), i, codes, step))
    return min(found)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes__equal_a_plain_loop(bits):
    w = torch.randn(60, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, steps = solve(w, WeightSpec(bits, solver="rtn")), set()
    for row, codes, scale in zip(w, q.codes, q.scale, strict=True):
        _, step, want, s = by_hand(row, bits)
        steps.add(step)
        assert codes.tolist() == want
        assert scale.item() == pytest.approx(s, rel=1e-6)
    assert steps == ({0} if bits == 8 else {1, 2, 3} if bits == 2 else {0, 1, 2})


def test_two_bits__clipping_loses_less_than_half_steps_do():
    w = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    clipped, kept = (solve_rtn(w, WeightSpec(2, solver="rtn"), clip=clip) for clip in (True, False))
    errors = [(q.dequantize() - w).abs() for q in (clipped, kept)]
    bounds = [q.scale.double()[:, None] * (1 + 1e-5) for q in (clipped, kept)]
    assert (errors[0] <= bounds[0]).all()
    assert (errors[1] <= bounds[1] / 2).all()
    lost = [error.square().sum(1) for error in errors]
    assert (lost[0] <= lost[1]).all()
    assert lost[0].sum() < 0.8 * lost[1].sum()


def test_groups__each_is_a_row_of_its_own():
    w = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    q = solve(w, WeightSpec(4, PerGroup(32)))
    flat = solve(w.reshape(15, 32), WeightSpec(4))
    assert q.scale.shape == (5, 3)
    assert torch.equal(q.codes.reshape(15, 32), flat.codes)
    assert torch.equal(q.scale.reshape(15), flat.scale)
    assert torch.equal(q.dequantize().reshape(15, 32), flat.dequantize())


@pytest.mark.parametrize("solver", ["rtn", "mse_clip", "awq_clip", "gptq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups__that_do_not_divide_the_width_leave_a_short_one(solver, symmetric):
    w = torch.randn(4, 100, generator=torch.Generator().manual_seed(8))
    spec = WeightSpec(4, PerGroup(32), solver, symmetric=symmetric)
    q = solve(w, spec, torch.eye(100), name="layers.0.down_proj")
    alone = solve(w[:, 96:], spec, torch.eye(4))
    assert q.note == "the last group has 4 of 32 input channels"
    assert q.scale.shape == (4, 4)
    assert torch.equal(q.codes[:, 96:], alone.codes)
    assert torch.equal(q.dequantize()[:, 96:], alone.dequantize())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_asymmetric__error_at_most_half_a_step_and_zero_exact(bits):
    w = torch.rand(6, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(9)) * 3 - 0.7
    w[0], w[1, 5] = w[0].abs() + 1, 0
    q = solve(w, WeightSpec(bits, PerGroup(16), symmetric=False))
    assert q.zero.dtype == torch.int8
    assert ((q.dequantize() - w).abs() <= q.by_channel(q.scale) * (0.5 + 1e-5)).all()
    assert q.dequantize()[1, 5] == 0
    low, high = w[:, :16].amin(1).clamp(max=0), w[:, :16].amax(1)
    assert_close(q.scale[:, 0].double(), (high - low) / (2**bits - 1), torch.float32)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([8, 32]),
    exponent=st.integers(-30, 30),
    kind=st.sampled_from(["any", "ties", "bfloat16", "one sign", "zero"]),
)
def test_asymmetric__has_torchaos_codes_and_zero_points(seed, bits, group, exponent, kind):
    """Of float32, as IntxWeightOnlyConfig asks torchao for them; weights of bfloat16 are rounded as the float32 that they are."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 96, generator=g) * 10.0**exponent
    if kind == "ties":
        w = torch.randint(-9, 10, w.shape, generator=g) * 0.1 * 10.0**exponent
    elif kind == "one sign":
        w = w.abs()
    elif kind == "zero":
        w[:, :group] = 0
    stored = w.bfloat16() if kind == "bfloat16" else w
    ends = {"quant_min": -(2 ** (bits - 1)), "quant_max": 2 ** (bits - 1) - 1}
    scale, zero = choose_qparams_affine(
        stored.float(),
        MappingType.ASYMMETRIC,
        (1, group),
        target_dtype=torch.int8,
        zero_point_dtype=torch.int8,
        keepdim=True,
        eps=torch.finfo(torch.float32).smallest_normal,  # before 0.18 torchao's least scale was 1.2e-7
        **ends,
    )
    q = solve(stored, WeightSpec(bits, PerGroup(group), symmetric=False))
    assert torch.equal(q.zero, zero)
    assert torch.equal(q.codes, quantize_affine(stored.float(), (1, group), scale, zero, output_dtype=torch.int8, **ends))
    assert torch.equal(q.scale, scale if kind != "zero" else torch.where(scale > 1e-37, scale, 1))


@settings(max_examples=40)
@given(
    n=st.integers(1, 6),
    k=st.integers(1, 40),
    bits=st.sampled_from([4, 8]),
    exponent=st.integers(-44, 37),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 10_000),
)
def test_error__at_most_half_a_step_at_any_magnitude(n, k, bits, exponent, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    w = (torch.randn(n, k, generator=g, dtype=torch.float64).clamp(-3, 3) * 10.0**exponent).to(dtype)
    q = solve(w, WeightSpec(bits))
    assert q.codes.dtype == torch.int8
    assert q.codes.min() >= -(2 ** (bits - 1))
    assert q.codes.max() <= 2 ** (bits - 1) - 1
    assert q.scale.dtype == torch.float32
    assert torch.isfinite(q.scale).all()
    assert (q.scale > 0).all()
    step = q.scale.double()[:, None]
    error = (w.double() - q.codes.double() * step).abs()
    # a scale that is subnormal in float32 has few digits left, so the largest value may lie off the grid
    normal = (w.double().abs().amax(1, keepdim=True) / 2 ** (bits - 1) > 1e-37).expand_as(error)
    assert (error <= step * (0.5 + 1e-5)).masked_select(normal).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([4, 8]))
def test_grid__weights_that_are_on_it_come_back(seed, bits):
    g = torch.Generator().manual_seed(seed)
    top = 2 ** (bits - 1) - 1
    codes = torch.randint(-top, top + 1, (4, 16), generator=g)
    codes[:, 0] = top
    scale = torch.rand(4, generator=g) + 0.01
    q = solve((codes * scale[:, None].double()).double(), WeightSpec(bits))
    assert torch.equal(q.codes.long(), codes)
    assert torch.equal(q.scale, scale)


@pytest.mark.parametrize("solver", ["rtn", "mse_clip", "awq_clip", "gptq"])
def test_zero_rows__codes_zero_and_scale_one(solver):
    w = torch.randn(3, 8)
    w[1] = 0
    q = solve(w, WeightSpec(4, solver=solver), torch.eye(8))
    assert q.scale[1] == 1
    assert not q.codes[1].any()
    assert torch.isfinite(q.dequantize()).all()


@pytest.mark.parametrize("solver", ["rtn", "mse_clip", "awq_clip", "gptq"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite__is_refused_with_its_place(solver, value):
    w = torch.randn(3, 8)
    w[2, 5] = value
    with pytest.raises(ValueError, match=r"q_proj holds 1 values.*\[2, 5\].*keep"):
        solve(w, WeightSpec(4, solver=solver), torch.eye(8), name="q_proj")


def test_not_a_matrix__is_refused():
    with pytest.raises(ValueError, match="shape"):
        solve(torch.randn(2, 3, 4), WeightSpec(4))


@pytest.mark.parametrize("solver", ["rtn", "mse_clip", "awq_clip", "gptq"])
def test_skip__columns_get_code_zero_and_do_not_widen_the_scale(solver):
    w = torch.randn(4, 10)
    w[:, 3] = 100
    q = solve(w, WeightSpec(4, solver=solver), torch.eye(10), skip=torch.tensor([3]))
    assert not q.codes[:, 3].any()
    assert (q.scale < 1).all()
    assert w[0, 3] == 100
