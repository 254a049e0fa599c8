"""What a solver starts from where inputs have drifted: the least-squares solution, a share of it, and columns left alone."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tolerance import TOLERANCE

from mmqc.solvers.asymmetric import DAMPING, toward_float


def data(seed: int, rows: int = 40, n: int = 5, k: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=g, dtype=torch.float64)
    return torch.randn(n, k, generator=g, dtype=torch.float64), x, x + 0.3 * torch.randn(rows, k, generator=g, dtype=torch.float64)


@given(seed=st.integers(0, 10**6), share=st.floats(0.05, 1))
@settings(max_examples=30, deadline=None)
def test_toward_float__is_the_ridge_solution_and_a_share_of_the_way_to_it(seed: int, share: float) -> None:
    w, x, y = data(seed)
    h, d = y.T @ y, (x - y).T @ y
    ridge = DAMPING * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    wanted = w + w @ d @ torch.linalg.inv(h + ridge)  # argmin of |X Wᵀ - Y Vᵀ|² + λ |V - W|²
    kept = h.clone()
    gradient = (y @ wanted.T - x @ w.T).T @ y + (wanted - w) @ ridge
    assert float(gradient.abs().max()) < 1e-9
    assert float((toward_float(w, h, d, share) - (w + share * (wanted - w))).abs().max()) < 1e-10
    assert torch.equal(h, kept)
    left = [float((x @ w.T - y @ v.T).norm()) for v in (w, toward_float(w, h, d, share), wanted)]
    more = 1 + TOLERANCE[torch.float64][0]  # a share of one is the solution, in another order of sums
    assert left[0] * more >= left[1]
    assert left[1] * more >= left[2]


def test_toward_float__a_skipped_channels_drift_counts_and_its_weights_stay() -> None:
    w, x, y = data(1)
    skip = [2, 4]
    seen = y.clone()
    seen[:, skip] = 0
    h, d = seen.T @ seen, (x - y).T @ seen
    moved = toward_float(w, h, d, 1.0)
    assert torch.equal(moved[:, skip], w[:, skip])
    none = d.clone()
    none[skip] = 0
    assert float((moved - toward_float(w, h, none, 1.0)).abs().max()) > 1e-3
    before, after = ((x @ w.T - y @ v.T).norm() for v in (w, moved))
    assert after < before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_toward_float__no_inputs_or_no_drift_leave_the_weight(dtype: torch.dtype) -> None:
    w, _, y = data(2)
    w, zero = w.to(dtype), torch.zeros(7, 7, dtype=torch.float64)
    assert torch.equal(toward_float(w, zero, zero), w)
    assert torch.equal(toward_float(w, y.T @ y, zero), w)


@pytest.mark.parametrize(("spoiled", "message"), [("nan", "NaN or infinite"), ("indefinite", "not positive semidefinite")])
def test_toward_float__says_what_is_wrong_with_a_second_moment(spoiled: str, message: str) -> None:
    w, x, y = data(3)
    h, d = y.T @ y, (x - y).T @ y
    bad = h.clone().index_fill_(0, torch.tensor([1]), float("nan")) if spoiled == "nan" else h - h.diagonal().min() / 2
    kept = bad.clone()
    with pytest.raises(ValueError, match=f"layers.0.up.weight: .*{message}"):
        toward_float(w, bad, d, name="layers.0.up.weight")
    assert torch.equal(bad, kept) or spoiled == "nan"
