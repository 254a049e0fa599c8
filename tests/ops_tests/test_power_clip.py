"""The op against a search by hand in float64."""

import pytest
import torch

import mmqc.ops  # noqa: F401

op = torch.ops.mmqc.power_clip.default
SHRINKS = [1 - i / 20 for i in range(16)]


def problem(asymmetric=False, costly=False):
    g = torch.Generator().manual_seed(1)
    w = torch.randn(5, 3, 12, generator=g, dtype=torch.float64)
    scale = w.abs().amax(-1, keepdim=True).float() / 3
    zero = torch.randint(-2, 3, (5, 3, 1), generator=g).float() if asymmetric else None
    return w, scale, zero, torch.rand(3, 12, generator=g, dtype=torch.float64) if costly else None, SHRINKS, 2.4, 3


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_power_clip__is_the_best_of_all(asymmetric, costly):
    w, scale, zero, cost, *rest = problem(asymmetric, costly)
    best = op(w, scale, zero, cost, *rest)
    z, c = 0 if zero is None else zero.double(), 1 if cost is None else cost
    values = [(((w / (p * scale.double())).round() + z).clamp(-4, 3) - z) * p * scale.double() for p in SHRINKS]
    losses = torch.stack([((((v - w) / scale.double()).abs() ** 2.4) * c).sum(-1) for v in values])
    assert torch.equal(best[..., 0], torch.tensor(SHRINKS, dtype=torch.float64)[losses.argmin(0)])
    assert len(best.unique()) > 2


def test_power_clip__what_is_on_the_grid_stays():
    codes = torch.randint(-4, 4, (4, 1, 30))
    assert (op(codes * 0.25, torch.full((4, 1, 1), 0.25), None, None, SHRINKS, 2.4, 3) == 1).all()


def test_power_clip__opcheck():
    for given in (problem(), problem(True, True)):
        torch.library.opcheck(op, given)


@pytest.mark.parametrize(
    ("place", "other", "message"),
    [
        (0, torch.zeros(5, 36), r"\[N, G, g\]"),
        (1, torch.ones(5, 3), r"s and z \[N, G, 1\]"),
        (3, torch.ones(12), "one for each channel"),
        (4, [], "0 clips"),
        (6, 9, "2 to 8"),
    ],
)
def test_power_clip__refuses(place, other, message):
    given = list(problem())
    given[place] = other
    with pytest.raises(ValueError, match=message):
        op(*given)
