"""Weights in two precisions: GPTQ over both parts is optimal brain surgery in that order."""

import pytest
import torch

from mmqc.config import WeightSpec
from mmqc.solvers import Quantized, gptq, mse_clip, rtn
from mmqc.solvers.mixed import Part, parts_of, solve

IN_ORDER = WeightSpec(4, solver="gptq", act_order=False, clip="inputs")
HIGH = torch.tensor([2, 7, 11])


def problem(n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the second moment of inputs that correlate and have a mean, float64."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(k, dtype=torch.float64) + torch.randn(k, k, generator=g, dtype=torch.float64) / k**0.5
    x = torch.randn(4 * k, k, generator=g, dtype=torch.float64) @ mix + torch.rand(k, generator=g, dtype=torch.float64)
    return torch.randn(n, k, generator=g, dtype=torch.float64), x.T @ x


def loss(w: torch.Tensor, solved: Quantized, h: torch.Tensor) -> float:
    d = w - solved.dequantize().double()
    return float((d @ h * d).sum())


def surgery(w: torch.Tensor, h: torch.Tensor, order: list[int], scale: torch.Tensor, bits: list[int]) -> torch.Tensor:
    """Invert what is left of H at each step; ``scale`` [N, K] and ``bits`` by channel."""
    h = h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    left, w, codes = list(order), w.clone(), torch.zeros_like(w)
    while left:
        inverse, i = torch.linalg.inv(h[left][:, left]), left[0]
        top = 2 ** (bits[i] - 1)
        codes[:, i] = (w[:, i] / scale[:, i]).round().clamp(-top, top - 1)
        w[:, left] -= ((w[:, i] - codes[:, i] * scale[:, i]) / inverse[0, 0])[:, None] * inverse[0]
        left = left[1:]
    return codes.to(torch.int8)


@pytest.mark.parametrize("act_order", [False, True])
def test_mixed_gptq__is_optimal_brain_surgery_with_the_high_part_last(act_order: bool) -> None:
    w, h = problem(9, 17, seed=1)
    parts = parts_of(17, HIGH, 4, 8)
    solved = solve(w, parts, WeightSpec(4, solver="gptq", act_order=act_order, clip="weights"), h)
    columns = [p.columns for p in parts]
    if act_order:
        columns = [c[h.diagonal()[c].argsort(descending=True, stable=True)] for c in columns]
    bits = [8 if k in HIGH.tolist() else 4 for k in range(17)]
    codes = surgery(w, h, torch.cat(columns).tolist(), solved.by_channel(solved.scale).double(), bits)
    assert torch.equal(solved.codes, codes)
    low, high = (mse_clip.clipped(w[:, p.columns][:, None], WeightSpec(p.bits)).scale[:, 0, 0] for p in parts)
    assert torch.equal(solved.scale, torch.stack((low, torch.maximum(high, low / 32)), 1))


def test_mixed_gptq__one_part_is_gptq() -> None:
    w, h = problem(9, 150, seed=2)
    whole = solve(w, parts_of(150, None, 4, 8), IN_ORDER, h)
    plain = gptq.solve(w, IN_ORDER, h)
    assert torch.equal(whole.codes, plain.codes)
    assert torch.equal(whole.scale[:, 0], plain.scale)


def test_mixed_gptq__beats_rounding_and_one_precision() -> None:
    w, h = problem(20, 64, seed=3)
    high = h.diagonal().argsort(descending=True)[:8]
    parts = parts_of(64, high, 4, 8)
    both = loss(w, solve(w, parts, IN_ORDER, h), h)
    assert both < loss(w, solve(w, parts, WeightSpec(4), h), h)
    assert both < loss(w, gptq.solve(w, IN_ORDER, h), h)


@pytest.mark.parametrize("solver", ["rtn", "mse_clip", "awq_clip"])
def test_mixed__other_solvers_take_each_part_by_itself(solver: str) -> None:
    w, h = problem(6, 17, seed=4)
    parts = parts_of(17, HIGH, 3, 8)
    solved = solve(w, parts, WeightSpec(3, solver=solver), h)
    assert solved.codes[:, parts[0].columns].abs().max() <= 4
    assert solved.codes[:, HIGH].abs().max() > 4
    if solver == "rtn":
        low, high = (rtn.solve(w[:, p.columns], WeightSpec(p.bits)) for p in parts)
        assert torch.equal(solved.codes[:, parts[0].columns], low.codes)
        assert torch.equal(solved.scale, torch.stack((low.scale, torch.maximum(high.scale, low.scale / 64)), 1))
        same = high.scale >= low.scale / 64
        assert 0 < same.sum() < len(same)
        assert torch.equal(solved.codes[same][:, HIGH], high.codes[same])
        assert torch.equal(solved.codes[~same][:, HIGH], (w[~same][:, HIGH] * 64 / low.scale[~same, None]).round().to(torch.int8))
    error = (solved.dequantize() - w).abs()
    assert float(error[:, HIGH].max()) < float(error[:, parts[0].columns].max())


@pytest.mark.parametrize("solver", ["gptq", "rtn"])
def test_mixed__high_steps_are_not_too_fine(solver: str) -> None:
    """Rows of tiny and of no high weights, of no low ones, and of none at all."""
    w, h = problem(5, 17, seed=6)
    low = [k for k in range(17) if k not in HIGH.tolist()]
    w[0, HIGH] *= 1e-4
    w[1, HIGH] = 0
    w[2, low] = 0
    w[3] = 0
    solved = solve(w, parts_of(17, HIGH, 4, 8), WeightSpec(4, solver=solver, act_order=False), h)
    assert torch.equal(solved.scale[:2, 1], solved.scale[:2, 0] / 32)
    assert float(solved.scale[2, 1]) < 0.1
    assert not solved.codes[3].any()
    if solver == "rtn":
        assert bool(((solved.dequantize() - w).abs() <= solved.by_channel(solved.scale) * 0.50001).all())
    assert bool(torch.isfinite(solved.scale).all())


def test_mixed__dead_channels_and_refusals() -> None:
    w, h = problem(6, 17, seed=5)
    h[3], h[:, 3] = 0, 0
    solved = solve(w, parts_of(17, HIGH, 4, 8), IN_ORDER, h)
    assert not solved.codes[:, 3].any()
    assert "1 input channels are always zero" in solved.note
    with pytest.raises(ValueError, match="not its 17 input channels"):
        solve(w, (Part(torch.arange(16), 4),), IN_ORDER, h)
    with pytest.raises(ValueError, match="needs calibration"):
        solve(w, parts_of(17, HIGH, 4, 8), IN_ORDER)
