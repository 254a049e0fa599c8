"""GPTQ: equal to optimal brain surgery with explicit inverses, and better than rounding where inputs correlate."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close
from torchao.quantization.granularity import PerGroup, PerRow

from mmqc.config import WeightSpec
from mmqc.solvers import gptq, rtn, solve
from mmqc.solvers.mse_clip import clipped
from mmqc.solvers.widest import widest

SPEC = WeightSpec(4, solver="gptq")
IN_ORDER = WeightSpec(4, solver="gptq", act_order=False)


def problem(n, k, seed, tokens=None):
    """A weight and the second moment of correlated inputs, float64."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens or 4 * k, k, generator=g, dtype=torch.float64)
    mix = torch.randn(k, k, generator=g, dtype=torch.float64) / k**0.5 + torch.diag(
        torch.rand(k, generator=g, dtype=torch.float64) * 2
    )
    x = x @ mix + torch.randn(k, generator=g, dtype=torch.float64)
    return torch.randn(n, k, generator=g, dtype=torch.float64), x.T @ x


def surgery(w, h, scale, act_order, damping=0.01):
    """Optimal brain quantization in a fixed order: invert what is left of H at each step; no Cholesky, no blocks."""
    k = w.shape[1]
    h = h + damping * h.diagonal().mean() * torch.eye(k, dtype=h.dtype)
    left = h.diagonal().argsort(descending=True, stable=True).tolist() if act_order else list(range(k))
    w, codes = w.clone(), torch.zeros_like(w)
    while left:
        inverse = torch.linalg.inv(h[left][:, left])
        i = left[0]
        codes[:, i] = (w[:, i] / scale).round().clamp(-8, 7)
        error = (w[:, i] - codes[:, i] * scale) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return codes


def loss(w, q, h):
    d = w - q.dequantize().double()
    return (d @ h * d).sum().item()


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("block", [1, 5, 128])
def test_codes__equal_optimal_brain_surgery(act_order, block):
    w, h = problem(6, 37, seed=0)
    q = gptq.solve(w, replace(SPEC, act_order=act_order, clip="weights"), h, block=block)
    scale = clipped(w[:, None], WeightSpec(4)).scale[:, 0, 0]
    assert torch.equal(q.scale, scale)
    assert torch.equal(q.codes.double(), surgery(w, h, scale.double(), act_order))
    assert q.note == ""


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 8), k=st.integers(8, 48))
def test_output_error__at_most_that_of_rounding_with_the_same_scales(seed, n, k):
    w, h = problem(n + 16, k, seed)
    q = gptq.solve(w, replace(SPEC, clip="none"), h)
    d = widest(w, SPEC).double() - w
    assert loss(w, q, h) <= ((d @ h) * d).sum()
    assert q.codes.min() >= -8
    assert q.codes.max() <= 7


def test_dispatch__by_the_name_in_the_spec():
    w, h = problem(4, 16, seed=1)
    assert torch.equal(solve(w, SPEC, h).codes, gptq.solve(w, SPEC, h).codes)


def test_diagonal_inputs__are_plain_rounding():
    w, _ = problem(5, 24, seed=2)
    q = gptq.solve(w, replace(SPEC, clip="none"), torch.diag(torch.rand(24) + 0.1))
    assert torch.equal(q.dequantize(), widest(w, SPEC))


def test_grid__weights_that_are_on_it_come_back():
    _, h = problem(1, 20, seed=3)
    codes = torch.randint(-7, 8, (6, 20), generator=torch.Generator().manual_seed(3))
    codes[:, 0] = 7
    q = gptq.solve(codes.double() * 0.125, SPEC, h)
    assert torch.equal(q.codes.long(), codes)


def test_skip__solves_the_rest_as_if_the_columns_did_not_exist():
    w, h = problem(6, 30, seed=4)
    skip = torch.tensor([0, 17, 29])
    rest = torch.tensor([i for i in range(30) if i not in (0, 17, 29)])
    q = gptq.solve(w, SPEC, h, skip=skip)
    alone = gptq.solve(w[:, rest], SPEC, h[rest][:, rest])
    assert torch.equal(q.codes[:, rest], alone.codes)
    assert torch.equal(q.scale, alone.scale)
    assert not q.codes[:, skip].any()


def test_skip__everything_is_all_zero():
    w, h = problem(3, 5, seed=4)
    q = gptq.solve(w, SPEC, h, skip=torch.arange(5))
    assert not q.codes.any()
    assert (q.scale == 1).all()


def test_dead_inputs__get_code_zero_and_are_noted():
    w, h = problem(6, 30, seed=5)
    h[7], h[:, 7] = 0, 0
    q = gptq.solve(w, SPEC, h)
    assert not q.codes[:, 7].any()
    assert q.note == "1 input channels are always zero"


def test_few_tokens__a_singular_moment_is_enough():
    w, h = problem(6, 40, seed=6, tokens=5)
    q = gptq.solve(w.float(), SPEC, h.float())
    assert loss(w, q, h) <= loss(w, rtn.solve(w, SPEC), h)


def test_indefinite__gets_more_damping_and_says_so():
    w, h = problem(4, 16, seed=7)
    smallest = torch.linalg.eigvalsh(h)[0]
    q = gptq.solve(w, SPEC, h - (smallest + 0.05 * h.diagonal().mean()) * torch.eye(16, dtype=h.dtype))
    assert "damping 0.1 " in q.note


@pytest.mark.parametrize(
    ("hessian", "words"),
    [
        (None, "needs calibration"),
        (torch.eye(5), "second moment has shape"),
        (torch.full((8, 8), float("nan")), "NaN or infinite"),
        (torch.eye(8) - 40 * torch.ones(8, 8).fill_diagonal_(0), "not positive semidefinite"),
    ],
)
def test_hessian__that_cannot_be_used_is_refused_by_name(hessian, words):
    with pytest.raises(ValueError, match=f"layers.3.fc2.*{words}"):
        solve(torch.randn(4, 8), SPEC, hessian, name="layers.3.fc2")


def fit(part, bits, symmetric, cost, clip):
    """Scale and zero point [N] of a group [N, g] by QuaRot's search over 80 clips; by what channels cost, over zeros too."""
    low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
    top, bottom = 2 ** (bits - 1) - 1, -(2 ** (bits - 1))
    widest = part.abs().amax(1) / top if symmetric else (high - low) / (2**bits - 1)
    zero = torch.zeros_like(widest) if symmetric else bottom - (low / widest).round()
    starts = [(widest, zero)]
    for moved in (-1, 1) if clip == "inputs" and not symmetric else ():  # zero_point.py
        z = (zero + moved).clamp(bottom, top)
        up, down = (high / (top - z)).nan_to_num(0, 0, 0), (-low / (z - bottom)).nan_to_num(0, 0, 0)
        starts.append((torch.maximum(up, down), z))
    best, scale = torch.full_like(widest, torch.inf), widest.clone()
    weigh = cost if clip == "inputs" else torch.ones_like(cost)
    for start, z in starts:
        for i in range(1 if clip == "none" else 80):
            s = (start * (1 - i / 100))[:, None]
            values = (((part / s).round() + z[:, None]).clamp(bottom, top) - z[:, None]) * s
            error = ((values - part).abs().pow(2.4) * weigh).sum(1)
            better = error < best * (1 - 1e-9)
            best, scale, zero = (torch.where(better, *pair) for pair in ((error, best), (s[:, 0], scale), (z, zero)))
    return scale, zero


def textbook(w, h, spec):
    """GPTQ as in the paper's Algorithm 1, in float64 and without blocks; returns the quantized weight."""
    k, g = w.shape[1], spec.group_size or w.shape[1]
    order = h.diagonal().argsort(descending=True, stable=True) if spec.act_order else torch.arange(k)
    h = h + spec.damping * h.diagonal().mean() * torch.eye(k, dtype=h.dtype)
    u = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    cost = torch.empty_like(u[0]).scatter_(0, order, u.diagonal().square().reciprocal())
    how = spec.bits, spec.symmetric
    grids = [fit(w[:, c : c + g], *how, cost[c : c + g], spec.how_to_clip) for c in range(0, k, g)]
    left, values = w[:, order].clone(), torch.zeros_like(w)
    for i, column in enumerate(order.tolist()):
        if spec.group_size and not spec.static_groups and i % g == 0:
            grids[i // g] = fit(left[:, i : i + g], *how, cost[i : i + g], spec.how_to_clip)
        s, z = grids[column // g]
        q = ((left[:, i] / s).round() + z).clamp(-(2 ** (spec.bits - 1)), 2 ** (spec.bits - 1) - 1)
        values[:, column] = (q - z) * s
        left[:, i + 1 :] -= torch.outer((left[:, i] - values[:, column]) / u[i, i], u[i, i + 1 :])
    return values


ROUTES = {"act_order": (True, True), "in order": (False, True), "dynamic groups": (False, False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 0), (4, 32), (3, 64), (2, 24)])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("clip", ["inputs", "weights", "none"])
def test_layer_error__within_one_percent_of_the_textbook(clip, route, bits, group, symmetric, dtype):
    act_order, static = ROUTES[route]
    granularity = PerGroup(group) if group else PerRow()
    spec = WeightSpec(bits, granularity, "gptq", symmetric=symmetric, act_order=act_order, static_groups=static)
    spec = replace(spec, clip=clip)
    w, h = problem(12, 150, seed=8)
    q, values = gptq.solve(w.to(dtype), spec, h), textbook(w, h, spec)
    d = w - values
    assert loss(w, q, h) == pytest.approx((d @ h * d).sum().item(), rel=0.01)
    if dtype == torch.float64:
        assert_close(q.dequantize().double(), values, torch.float32)


def test_damping__is_the_specs():
    w, h = problem(6, 30, seed=9)
    spec = WeightSpec(3, solver="gptq", damping=0.5, clip="inputs")
    assert_close(gptq.solve(w, spec, h).dequantize().double(), textbook(w, h, spec), torch.float32)
    assert not torch.equal(gptq.solve(w, spec, h).codes, gptq.solve(w, replace(spec, damping=0.01), h).codes)


def test_asymmetric__dead_and_skipped_channels_are_zero():
    w, h = problem(5, 24, seed=10)
    h[3], h[:, 3] = 0, 0
    spec = WeightSpec(4, PerGroup(8), "gptq", symmetric=False)
    q = gptq.solve(w + 0.5, spec, h, skip=torch.tensor([11]))
    assert not q.dequantize()[:, [3, 11]].any()
    assert q.zero is not None
    assert q.zero.any()


def test_clip__by_the_inputs_keeps_large_weights_that_count():
    w, h = torch.randn(16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(12)) * 0.1, torch.eye(64).double()
    w[:, 7], h[7, 7] = 1.0, 1e4
    by = {clip: gptq.solve(w, WeightSpec(3, solver="gptq", clip=clip), h) for clip in ("inputs", "weights", "none")}
    missed = {clip: float((q.dequantize().double() - w)[:, 7].abs().max()) for clip, q in by.items()}
    assert missed["inputs"] < 0.01 < missed["weights"]
    assert loss(w, by["inputs"], h) < 0.01 * loss(w, by["weights"], h)
    assert loss(w, by["inputs"], h) <= loss(w, by["none"], h)


def test_clip__unless_it_is_said_is_the_best_of_several_but_for_8_bits():
    assert {WeightSpec(bits, PerGroup(32), symmetric=s).how_to_clip for bits in (2, 3, 4) for s in (True, False)} == {"best"}
    assert WeightSpec(8).how_to_clip == "inputs"
    assert WeightSpec(2, clip="weights").how_to_clip == "weights"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("group", [0, 32])
def test_best__each_row_has_the_codes_of_the_sweep_that_loses_least(route, group, monkeypatch):
    monkeypatch.setattr(gptq, "ROUNDS", 0)
    act_order, static = ROUTES[route]
    spec = WeightSpec(2, PerGroup(group) if group else PerRow(), "gptq", act_order=act_order, static_groups=static)
    w, h = problem(40, 100, seed=13)
    damped = h + spec.damping * h.diagonal().mean() * torch.eye(100, dtype=h.dtype)
    each = []
    for clip in gptq.CANDIDATES:
        monkeypatch.setattr(gptq, "CANDIDATES", (clip,))
        q = gptq.solve(w, spec, h)
        d = q.dequantize().double() - w
        each.append((((d @ damped) * d).sum(1), q))
    monkeypatch.undo()
    monkeypatch.setattr(gptq, "ROUNDS", 0)
    best = torch.stack([lost for lost, _ in each]).argmin(0)
    q = gptq.solve(w, spec, h)
    assert len(best.unique()) > 1
    assert torch.equal(q.codes, torch.stack([each[i][1].codes[n] for n, i in enumerate(best.tolist())]))
    assert torch.equal(q.scale, torch.stack([each[i][1].scale[n] for n, i in enumerate(best.tolist())]))
