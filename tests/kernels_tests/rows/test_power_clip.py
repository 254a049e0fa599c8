"""The kernel against the op's plain-torch reference: the same clips, or clips that lose as little."""

import pytest
import torch
from tolerance import assert_close

from mmqc.ops import power_clip as op

kernel = pytest.importorskip("mmqc.kernels.rows.power_clip")
SHRINKS = [1 - i / 10 for i in range(6)]


def problem(shape, device, asymmetric=False, costly=False):
    g = torch.Generator().manual_seed(sum(shape))
    w = torch.randn(shape, generator=g)
    scale, zero = w.abs().amax(-1, keepdim=True) / 7, torch.randint(-3, 4, (*shape[:2], 1), generator=g).float()
    cost = torch.rand(shape[1:], generator=g).to(device) if costly else None
    return w.to(device), scale.to(device), zero.to(device) if asymmetric else None, cost


def lost(w, scale, zero, cost, p):
    z, c = 0 if zero is None else zero, 1 if cost is None else cost
    return (((((w / scale / p).round() + z).clamp(-8, 7) - z) * p - w / scale).abs().pow(2.4) * c).sum(-1)


@pytest.mark.parametrize(("asymmetric", "costly"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(3, 1, 1), (1, 2, 33), (5, 7, 16), (2, 1, 1100)])
def test_power_clip__loses_no_more_than_the_reference(shape, asymmetric, costly, device):
    given = problem(shape, device, asymmetric, costly)
    out = torch.full((*shape[:2], 1), torch.nan, device=device)
    best = kernel.power_clip(*given, SHRINKS, 2.4, 4, out)
    want = op.reference(*given, SHRINKS, 2.4, 4)
    assert torch.isin(best, torch.tensor(SHRINKS, device=device)).all()
    assert_close(lost(*given, best), lost(*given, want))


def test_power_clip__of_a_part_and_what_it_cannot_take(device):
    w, scale, *_ = problem((40, 1, 24), device)
    wide = torch.full((24, 50), torch.nan, device=device)
    wide[:, :40] = w[:, 0].T
    assert torch.equal(
        kernel.power_clip(wide[:, :40].T[:, None], scale, None, None, SHRINKS, 2.4, 4),
        kernel.power_clip(w, scale, None, None, SHRINKS, 2.4, 4),
    )
    assert "float32" in kernel.supports(w.double(), scale, None, None)
    with pytest.raises(ValueError, match="power_clip: weights are float32"):
        kernel.power_clip(w.double(), scale, None, None, SHRINKS, 2.4, 4)
