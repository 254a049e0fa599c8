"""The clip search: the best of QuaRot's 80 candidates, never worse than absmax in its own norm."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close
from torchao.quantization.granularity import PerGroup, PerRow

from mmqc.config import WeightSpec
from mmqc.solvers import Quantized, clip, solve
from mmqc.solvers.grid import Grid, on_grid
from mmqc.solvers.mse_clip import clipped


def search(row, bits):
    """The scale of one row by the definition: all 80 candidates, the first of the best."""
    top = 2 ** (bits - 1) - 1
    widest = row.abs().max() / top
    candidates = [widest * (1 - i / 100) for i in range(80)]
    errors = [((row / s).round().clamp(-top - 1, top) * s - row).abs().pow(2.4).sum() for s in candidates]
    return candidates[int(torch.stack(errors).argmin())]


@pytest.mark.parametrize("bits", [4, 8])
def test_scale__is_the_best_of_the_80_candidates(bits):
    w = torch.randn(12, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w[:, 0] *= torch.linspace(1, 12, 12)
    want = torch.stack([search(row, bits) for row in w])
    torch.testing.assert_close(clipped(w[:, None], WeightSpec(bits)).scale[:, 0, 0].double(), want)
    q = solve(w, WeightSpec(bits, solver="mse_clip"))
    assert torch.equal(
        q.codes, (w / q.scale.double()[:, None]).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
    )


def test_blocks_of_rows__change_nothing(monkeypatch):
    w = torch.randn(9, 33, generator=torch.Generator().manual_seed(3))
    whole = clipped(w[:, None], WeightSpec(4)).scale
    monkeypatch.setattr(clip, "BLOCK", 70)
    assert torch.equal(clipped(w[:, None], WeightSpec(4)).scale, whole)


def norm(w: torch.Tensor, q: Quantized) -> torch.Tensor:
    return (w - q.dequantize()).abs().pow(2.4).sum(1)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([4, 8]), tail=st.floats(1, 50))
def test_error__never_above_round_to_nearest(seed, bits, tail):
    w = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
    w[:, 0] *= tail
    clipped = solve(w, WeightSpec(bits, solver="mse_clip"))
    plain = on_grid(w[:, None], Grid.of(w[:, None], bits), 32, 0)
    assert (norm(w, clipped) <= norm(w, plain) * (1 + 1e-5)).all()
    assert (clipped.scale <= plain.scale).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_magnitude__does_not_matter(magnitude):
    w = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    assert torch.equal(
        solve(w * magnitude, WeightSpec(4, solver="mse_clip")).codes, solve(w, WeightSpec(4, solver="mse_clip")).codes
    )


def test_grid__weights_that_are_on_it_keep_their_scale():
    codes = torch.randint(-7, 8, (4, 64), generator=torch.Generator().manual_seed(6))
    codes[:, 0] = 7
    q = solve(codes.double() * 0.25, WeightSpec(4, solver="mse_clip"))
    assert torch.equal(q.codes.long(), codes)
    assert (q.scale == 0.25).all()


def by_hand(part, bits):
    """Codes and values of one group on the asymmetric grid, every one of the 80 candidates in turn."""
    steps, offset = 2**bits - 1, 2 ** (bits - 1)
    low, high = min(part.min().item(), 0), max(part.max().item(), 0)
    widest, best = torch.tensor((high - low) / steps, dtype=torch.float32).item(), (float("inf"), None, None)
    zero = round(-low / widest)
    for i in range(80):
        s = widest * (1 - i / 100)
        u = ((part / s).round() + zero).clamp(0, steps)
        error = ((u - zero) * s - part).abs().pow(2.4).sum().item()
        if error < best[0] * (1 - 1e-12):
            best = (error, u - offset, (u - zero) * s)
    return best[1], best[2], zero - offset


@pytest.mark.parametrize(("bits", "group", "width"), [(2, 8, 24), (3, 16, 40), (4, 0, 33)])
def test_asymmetric_groups__equal_a_plain_loop(bits, group, width):
    w = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.4
    q = solve(w, WeightSpec(bits, PerGroup(group) if group else PerRow(), "mse_clip", symmetric=False))
    step = group or width
    for n in range(4):
        for g, k in enumerate(range(0, width, step)):
            codes, values, zero = by_hand(w[n, k : k + step], bits)
            assert torch.equal(q.codes[n, k : k + step].double(), codes)
            assert_close(q.dequantize()[n, k : k + step], values)
            assert (q.zero[n, g] if group else q.zero[n]) == zero


def test_groups__each_is_a_row_of_its_own():
    w = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    q = solve(w, WeightSpec(3, PerGroup(32), "mse_clip"))
    flat = solve(w.reshape(15, 32), WeightSpec(3, solver="mse_clip"))
    assert torch.equal(q.codes.reshape(15, 32), flat.codes)
    assert torch.equal(q.scale.reshape(15), flat.scale)
