"""The clip search: the best of QuaRot's 80 candidates, never worse than absmax in its own norm."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.quantization.granularity import PerGroup

from mmqc.config import WeightSpec
from mmqc.solvers import Quantized, mse_clip, solve
from mmqc.solvers.mse_clip import clip_scale


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
    torch.testing.assert_close(clip_scale(w, bits).double(), want)
    q = solve(w, WeightSpec(bits, solver="mse_clip"))
    assert torch.equal(
        q.codes, (w / q.scale.double()[:, None]).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
    )


def test_blocks_of_rows__change_nothing(monkeypatch):
    w = torch.randn(9, 33, generator=torch.Generator().manual_seed(3))
    whole = clip_scale(w, 4)
    monkeypatch.setattr(mse_clip, "BLOCK", 70)
    assert torch.equal(clip_scale(w, 4), whole)


def norm(w: torch.Tensor, q: Quantized) -> torch.Tensor:
    return (w - q.dequantize()).abs().pow(2.4).sum(1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([4, 8]), tail=st.floats(1, 50))
def test_error__never_above_round_to_nearest(seed, bits, tail):
    w = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
    w[:, 0] *= tail
    clipped = solve(w, WeightSpec(bits, solver="mse_clip"))
    plain = solve(w, WeightSpec(bits, solver="rtn"))
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


def test_groups__are_refused():
    with pytest.raises(ValueError, match=r"fc2.*PerRow"):
        mse_clip.solve(torch.randn(4, 16), WeightSpec(4, PerGroup(8)), name="fc2")
