"""Sweeps side by side: what they say they lose, and that neither their number nor the parts of the rows change a row's codes."""

import pytest
import torch
from tolerance import assert_close
from torchao.quantization.granularity import PerGroup, PerRow

from mmqc.config import WeightSpec
from mmqc.solvers import gptq, sweep


def prepared(spec, n=9, k=50):
    """Weight, H with damping, and what a sweep takes."""
    g = torch.Generator().manual_seed(14)
    x = torch.randn(4 * k, k, generator=g, dtype=torch.float64) @ torch.randn(k, k, generator=g, dtype=torch.float64)
    w, h = torch.randn(n, k, generator=g, dtype=torch.float64), x.T @ x
    order = h.diagonal().argsort(descending=True) if spec.act_order else torch.arange(k)
    u, cost, _ = gptq.factored_(h.clone(), order, spec.damping, "weight")
    return w, h + spec.damping * h.diagonal().mean() * torch.eye(k, dtype=h.dtype), order, u, cost


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("act_order", "static"), [(True, True), (False, True), (False, False)])
def test_sweep__each_row_has_its_best_clip_and_says_what_it_loses(act_order, static, symmetric, monkeypatch):
    spec = WeightSpec(3, PerGroup(16), "gptq", symmetric=symmetric, act_order=act_order, static_groups=static)
    w, damped, *given = prepared(spec)
    alone = [sweep.sweep(w, spec, [clip], *given, 16) for clip in gptq.CANDIDATES]
    monkeypatch.setattr(sweep, "STACK", 4 * len(gptq.CANDIDATES) * w[:2].numel() * w.element_size())  # several parts
    monkeypatch.setattr(sweep, "PANELS", {"cpu": 37})
    codes, grid, lost = sweep.sweep(w, spec, gptq.CANDIDATES, *given, 16)
    best = torch.stack([a[2] for a in alone]).argmin(0)
    assert len(best.unique()) > 1
    assert torch.equal(codes, torch.stack([alone[i][0][n] for n, i in enumerate(best.tolist())]))
    assert torch.equal(grid.scale, torch.stack([alone[i][1].scale[n] for n, i in enumerate(best.tolist())]))
    d = gptq.packed(codes, grid, spec.group_size).dequantize().double() - w
    assert_close(lost, ((d @ damped) * d).sum(1), torch.float32)


def test_sweep__of_no_rows():
    spec = WeightSpec(4, PerRow(), "gptq")
    w, _, *given = prepared(spec)
    codes, grid, lost = sweep.sweep(w[:0], spec, gptq.CANDIDATES, *given, 16)
    assert (codes.shape, grid.scale.shape, lost.shape) == ((0, 50), (0, 1, 1), (0,))
