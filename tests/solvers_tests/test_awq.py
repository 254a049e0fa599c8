"""AWQ: the exponent and the clip that explicit inputs and plain loops choose, from second moments alone."""

import pytest
import torch
from tolerance import assert_close
from torch import Tensor
from torchao.quantization.granularity import PerGroup, PerRow

from mmqc.config import WeightSpec
from mmqc.solvers import awq, rtn, second_moment, solve
from mmqc.solvers.awq import Reader, reader_loss, search
from mmqc.solvers.widest import widest

SPECS = {
    "W4": WeightSpec(4),
    "W3 g16": WeightSpec(3, PerGroup(16)),
    "W4 g16 asymmetric": WeightSpec(4, PerGroup(16), symmetric=False),
}


def inputs(k: int, seed: int, tokens: int = 200) -> Tensor:
    """Correlated inputs float64 [tokens, k] whose channels differ in magnitude by some orders."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=g, dtype=torch.float64) @ torch.randn(k, k, generator=g, dtype=torch.float64)
    return x * torch.exp(1.5 * torch.randn(k, generator=g, dtype=torch.float64))


def weight(n: int, k: int, seed: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reader(w: Tensor, x: Tensor, spec: WeightSpec, channel: Tensor | None = None) -> Reader:
    channel = torch.arange(w.shape[1]) if channel is None else channel
    return Reader("a", w, channel, x.T @ x, x.abs().mean(0), spec)


def rounded(w: Tensor, spec: WeightSpec) -> Tensor:
    """Pseudo-quantization as in the authors' code, row by row and group by group."""
    out, g = torch.zeros_like(w), spec.group_size or w.shape[1]
    for n in range(len(w)):
        for k in range(0, w.shape[1], g):
            part, top = w[n, k : k + g], 2 ** (spec.bits - 1)
            low, high = part.min().clamp(max=0), part.max().clamp(min=0)
            s = part.abs().max() / (top - 1) if spec.symmetric else (high - low) / (2 * top - 1)
            z = 0 if spec.symmetric else (-low / s).round() - top
            out[n, k : k + g] = (((part / s).round() + z).clamp(-top, top - 1) - z) * s
    return out


def best_alpha(ws: list[Tensor], x: Tensor, spec: WeightSpec, duo: bool) -> float:
    """The exponent whose outputs, computed from the inputs themselves, are closest."""
    errors = []
    for i in range(20):
        s = x.abs().mean(0) ** (i / 20)
        if duo:
            g = spec.group_size or x.shape[1]
            groups = torch.cat(ws).abs().unflatten(1, (-1, g))
            s = s / ((groups / groups.amax(-1, keepdim=True)).flatten(1).mean(0) ** (1 - i / 20) + 1e-4)
        s = s.clamp(min=1e-4)
        s = s / (s.max() * s.min()).sqrt()
        errors.append(sum(((x / s) @ rounded(w * s, spec).T - x @ w.T).square().sum() for w in ws))
    return int(torch.stack(errors).argmin()) / 20


@pytest.mark.parametrize("duo", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("seed", [0, 1])
def test_alpha__is_the_references(spec: str, duo: bool, seed: int) -> None:
    x, ws = inputs(48, seed), [weight(12, 48, seed + 5), weight(7, 48, seed + 9)]
    found = search([reader(w, x, SPECS[spec]) for w in ws], 48, duo=duo)
    assert found.alpha == best_alpha(ws, x, SPECS[spec], duo)
    assert found.loss < found.plain
    assert_close((found.scale.max() * found.scale.min())[None], torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("panel", [13, 1024])
def test_loss__is_the_squared_error_of_the_output(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_moment, "PANEL", panel)
    x, w, spec = inputs(32, 3), weight(9, 32, 4), SPECS["W3 g16"]
    s = torch.rand(32, dtype=torch.float64) + 0.5
    want = ((x / s) @ rounded(w * s, spec).T - x @ w.T).square().sum()
    assert_close(torch.tensor(reader_loss(reader(w, x, spec), s)), want, torch.float32)


def test_search__without_large_channels_gains_nothing_and_says_so() -> None:
    codes = torch.randint(-7, 8, (8, 16), generator=torch.Generator().manual_seed(0)).double()
    codes[:, 0] = 7
    found = search([reader(codes, inputs(16, 0), WeightSpec(4))], 16)
    assert (found.alpha, found.loss, found.plain) == (0, 0, 0)
    assert (found.scale == 1).all()
    duo = search([reader(codes, inputs(16, 0), WeightSpec(4))], 16, duo=True)
    assert duo.alpha is None
    assert str(duo) == "no scale is better"


@pytest.mark.parametrize("duo", [False, True])
def test_search__factors_that_leave_too_much_are_not_taken(duo: bool) -> None:
    ones = torch.ones(48, dtype=torch.float64)
    readers = [reader(weight(24, 48, 1), inputs(48, 2), SPECS["W3 g16"])]
    best = search(readers, 48, duo=duo)
    part = best.loss / best.plain
    assert 0 < part < 1
    taken = search(readers, 48, duo=duo, at_most=part * 1.01)
    assert (taken.alpha, taken.loss) == (best.alpha, best.loss)
    assert torch.equal(taken.scale, best.scale)
    refused = search(readers, 48, duo=duo, at_most=part * 0.99)
    assert (refused.alpha, refused.loss, refused.plain) == (None, best.plain, best.plain)
    assert torch.equal(refused.scale, ones)
    assert str(refused) == f"no scale: the best one leaves output error x {part:.3f}"


def test_channels__several_columns_have_the_mean_and_others_are_left_alone() -> None:
    x, w, spec = inputs(20, 6), weight(5, 20, 7), WeightSpec(4)
    channel = torch.cat((torch.arange(8), torch.arange(8), torch.full((4,), -1)))
    found = search([reader(w, x, spec, channel)], 8)
    mean = x.abs().mean(0)
    magnitude = (mean[:8] + mean[8:16]) / 2
    assert found.alpha is not None
    s = magnitude.pow(found.alpha)
    assert_close(found.scale, s / (s.max() * s.min()).sqrt())
    whole = torch.cat((found.scale, found.scale, torch.ones(4, dtype=torch.float64)))
    d = widest(w * whole, spec).double() / whole - w
    assert_close(torch.tensor(found.loss), (x @ d.T).square().sum(), torch.float32)


def test_search__refuses_statistics_of_another_layer() -> None:
    wrong = Reader("fc1", weight(4, 8, 0), torch.arange(8), torch.eye(9), torch.ones(8), WeightSpec(4))
    with pytest.raises(ValueError, match=r"fc1: the second moment has shape \(9, 9\)"):
        search([wrong], 8)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (3, 0), (2, 12)])
def test_awq_clip__codes_are_the_references(bits: int, group: int, symmetric: bool) -> None:
    x, w = inputs(40, 8), weight(6, 40, 9)
    q = solve(w, WeightSpec(bits, PerGroup(group) if group else PerRow(), "awq_clip", symmetric), x.T @ x)
    clipped, top = 0, 2 ** (bits - 1)
    for n in range(6):
        for k in range(0, 40, group or 40):
            part, seen = w[n, k : k + (group or 40)], x[:, k : k + (group or 40)]
            low, high = part.min().clamp(max=0), part.max().clamp(min=0)
            widest = (part.abs().max() / (top - 1) if symmetric else (high - low) / (2 * top - 1)).float().double()
            z = torch.zeros(()) if symmetric else (-low / widest).round() - top
            tried = []
            for i in range(10):
                codes = ((part / (widest * (1 - i / 20))).round() + z).clamp(-top, top - 1)
                values = (codes - z) * widest * (1 - i / 20)
                tried.append(((seen @ (values - part)).square().sum().item(), codes, i))
            _, codes, i = min(tried, key=lambda t: t[0])
            clipped += i > 0
            assert torch.equal(q.codes[n, k : k + (group or 40)].double(), codes)
    assert clipped


def test_awq_clip__never_worse_than_rounding_within_a_group() -> None:
    x, w = inputs(32, 1), weight(8, 32, 2)
    q = solve(w, WeightSpec(3, solver="awq_clip"), x.T @ x).dequantize().double()
    plain = widest(w, WeightSpec(3)).double()
    assert ((x @ (q - w).T).square().sum(0) <= (x @ (plain - w).T).square().sum(0) * (1 + 1e-6)).all()


def test_candidates__magnitude_zero_is_no_division_by_zero() -> None:
    x = torch.tensor([0.0, 1e-8, 3.0], dtype=torch.float64)
    assert all(torch.isfinite(s).all() and (s > 0).all() for _, s in awq.candidates(x, None, 20))


@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (2, False), (3, True)])
def test_rounded_behind__is_round_to_nearest_where_the_widest_grid_wastes_a_level(bits: int, symmetric: bool) -> None:
    spec = WeightSpec(bits, PerGroup(8), symmetric=symmetric)
    w, scale = weight(5, 24, seed=4), torch.rand(24, dtype=torch.float64) + 0.5
    found = awq.rounded_behind(reader(w, inputs(24, seed=5), spec), scale)
    plain, nearest = (f.to(w) / scale for f in (widest(w * scale, spec), rtn.solve(w * scale, spec, clip=False).dequantize()))
    assert torch.equal(plain, nearest) == (not symmetric)
    assert torch.equal(found, nearest if (bits, symmetric) == (2, True) else plain)
