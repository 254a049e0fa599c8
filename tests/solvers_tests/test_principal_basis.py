"""ResQ's basis: orthogonal, of maximal variance, and Theorem 4.2's bound."""

import math

import pytest
import torch
from error_bound import error_bound
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqc.ops.quantize_per_token import reference as quantize
from mmqc.solvers.principal_basis import high_width, peak_basis, principal_basis, random_orthogonal


def activations(rows: int, n: int, seed: int) -> torch.Tensor:
    """Correlated rows with a mean and a falling spectrum, float64."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=g, dtype=torch.float64) * torch.logspace(0, -2, n, dtype=torch.float64)
    return x @ torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]


@settings(max_examples=15)
@given(st.integers(2, 40), st.integers(0, 3), st.integers(0, 5), st.sampled_from(["orthogonal", "hadamard"]))
def test_principal_basis__orthogonal_and_of_maximal_variance(n: int, high: int, seed: int, random: str) -> None:
    high = min(high, n - 1)
    x = activations(3 * n, n, seed)
    moment = x.T @ x
    u = principal_basis(moment, high, seed, random)
    eye = torch.eye(n, dtype=torch.float64)
    assert float((u.T @ u - eye).abs().max()) < 1e-10
    assert float((u @ u.T - eye).abs().max()) < 1e-10
    kept = float((x @ u[:, n - high :]).square().sum())
    best = float(torch.linalg.eigvalsh(moment)[n - high :].sum())
    assert kept == pytest.approx(best, rel=1e-10, abs=1e-10)
    other = random_orthogonal(n, seed + 100)[:, :high]
    assert float((x @ other).square().sum()) <= kept + 1e-10 * float(moment.trace())


def test_principal_basis__mixes_within_each_subspace_only() -> None:
    moment = torch.diag(torch.arange(1.0, 17, dtype=torch.float64))
    u = principal_basis(moment, 4, seed=3)
    assert float(u[12:, :12].abs().max()) < 1e-12
    assert float(u[:12, 12:].abs().max()) < 1e-12
    assert float(u.abs().max()) < 0.95
    assert not torch.equal(u, principal_basis(moment, 4, seed=4))
    flat = principal_basis(moment, 4, random="hadamard")
    assert float((flat[12:, 12:].abs() - 0.5).abs().max()) < 1e-12


def test_principal_basis__few_rows_and_refusals() -> None:
    x = activations(3, 12, 0)
    u = principal_basis(x.T @ x, 4)
    assert float((u.T @ u - torch.eye(12, dtype=torch.float64)).abs().max()) < 1e-10
    with pytest.raises(ValueError, match="NaN or infinite"):
        principal_basis(torch.full((4, 4), math.nan), 1)
    with pytest.raises(ValueError, match="4 high coordinates"):
        principal_basis(torch.eye(4), 4)


@pytest.mark.parametrize(
    ("width", "fraction", "high"), [(256, 1 / 8, 32), (64, 1 / 8, 8), (80, 1 / 8, 10), (4, 1 / 8, 1), (64, 0.0, 0), (1, 0.5, 0)]
)
def test_high_width(width: int, fraction: float, high: int) -> None:
    assert high_width(width, fraction) == high


@pytest.mark.parametrize("seed", range(3))
def test_error_bound__holds_on_gaussians_and_falls_with_the_high_energy(seed: int) -> None:
    """Theorem 4.2 for a token: dynamic ranges, 4 and 8 bits; a principal subspace has a lower bound and a lower error."""
    n, high, widths = 64, 8, [56, 8]
    x = activations(400, n, seed)
    results = {}
    for name, u in (("principal", principal_basis(x.T @ x, high)), ("random", random_orthogonal(n, seed))):
        z = x @ u
        q, s, o = quantize(z, None, widths, [4, 8])
        repeats = torch.tensor(widths)
        error = z - (q * s.repeat_interleave(repeats, -1) + o.repeat_interleave(repeats, -1))
        norms = (t.norm(dim=1).mean() for t in (error, z, z[:, n - high :]))
        actual, energy, top = map(float, norms)
        results[name] = actual, error_bound(energy, top, n, high, 4, 8)
    assert all(actual <= bound for actual, bound in results.values())
    assert results["principal"] < results["random"]
    assert results["principal"][1] < results["random"][1]


def test_principal_basis__three_subspaces() -> None:
    x = torch.randn(50, 12, dtype=torch.float64) * torch.logspace(0, 2, 12, dtype=torch.float64)
    u, two = principal_basis(x.T @ x, 3, lowest=4), principal_basis(x.T @ x, 3)
    values = torch.linalg.eigvalsh(x.T @ x)
    energy = (x @ u).square().sum(0)
    for part, expected in ((slice(4), values[:4]), (slice(4, 9), values[4:9]), (slice(9, 12), values[9:])):
        assert float(energy[part].sum()) == pytest.approx(float(expected.sum()), rel=1e-9)
    assert torch.equal(u[:, 9:], two[:, 9:])
    assert float((u.T @ u - torch.eye(12, dtype=torch.float64)).abs().max()) < 1e-10
    with pytest.raises(ValueError, match="8 high coordinates and 4 lowest"):
        principal_basis(x.T @ x, 8, lowest=4)


def test_peak_basis__the_largest_channels_come_last() -> None:
    peaks = torch.tensor([3.0, 9.0, 1.0, 7.0, 5.0])
    u = peak_basis(peaks, 2)
    assert float((u.T @ u - torch.eye(5, dtype=torch.float64)).abs().max()) < 1e-10
    assert not u[[0, 2, 4], 3:].any()
    assert not u[[1, 3], :3].any()
    with pytest.raises(ValueError, match="peaks"):
        peak_basis(peaks[None], 2)
