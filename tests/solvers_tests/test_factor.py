"""The in-place factor: UᵀU is the inverse, at sizes around the panels, and H is not lost if it needs more damping."""

import pytest
import torch
from tolerance import assert_close

from mmqc.config import WeightSpec
from mmqc.solvers import factor, gptq

SPEC = WeightSpec(4, solver="gptq")


def moment(k: int, tokens: int | None = None) -> torch.Tensor:
    g = torch.Generator().manual_seed(k)
    x = torch.randn(tokens or 3 * k, k, generator=g, dtype=torch.float64)
    return x.T @ x


@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, 31])
@pytest.mark.parametrize("panel", [1, 4, 8, 1024])
def test_factor__is_upper_and_gives_the_inverse(k: int, panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor, "PANEL", panel)
    h = moment(k)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(1))
    damped = h[order][:, order] + 0.01 * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    address = h.data_ptr()
    u, used = factor.inverse_factor_(h, order, 0.01, "w")
    assert (u.data_ptr(), used) == (address, 0.01)
    assert torch.equal(u, u.triu())
    assert_close(u.T @ u @ damped, torch.eye(k, dtype=torch.float64))


@pytest.mark.parametrize("panel", [3, 1024])
def test_factor__more_damping_starts_from_the_same_matrix(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factor, "PANEL", panel)
    h = moment(12)
    h = (
        h
        - 0.05 * h.diagonal().mean() * torch.eye(12, dtype=torch.float64)
        - torch.linalg.eigvalsh(h)[0] * torch.eye(12, dtype=torch.float64)
    )
    order = torch.arange(12)
    damped = h + 0.1 * h.diagonal().mean() * torch.eye(12, dtype=torch.float64)
    u, used = factor.inverse_factor_(h.clone(), order, 0.01, "w")
    assert used == pytest.approx(0.1)
    assert_close(u.T @ u @ damped, torch.eye(12, dtype=torch.float64))


def test_gptq__leaves_the_moment_alone_unless_told() -> None:
    w, h = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)), moment(12)
    before = h.clone()
    codes = gptq.solve(w, SPEC, h).codes
    assert torch.equal(h, before)
    assert torch.equal(gptq.solve(w, SPEC, h, overwrite=True).codes, codes)
    assert not torch.equal(h, before)
