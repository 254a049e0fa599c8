"""hadamard_slices: few rows, several programs on each, against the plain-torch op."""

import pytest
import torch
from row_scales import KINDS, row_scales
from tolerance import assert_close
from torch.nn import functional as F

from mmqc.ops import hadamard

kernel = pytest.importorskip("mmqc.kernels.hadamard.hadamard_quantize")
slices = pytest.importorskip("mmqc.kernels.hadamard.hadamard_slices")

SHAPES = [(1, 18944), (2, 5120), (3, 3584), (1, 4304), (2, 2048)]


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    monkeypatch.setattr(kernel, "few", lambda x, t: True)
    # whatever falls back to the other kernel fails
    monkeypatch.setattr(kernel, "hadamard_quantize_kernel", None)


def transform(x):
    return hadamard.reference(x, [f.to(x.device) for f in hadamard.hadamard_factors(x.shape[1])])


@pytest.mark.parametrize("shape", SHAPES)
def test_hadamard_slices__equals_the_op(shape, device):
    x = torch.randn(shape, device=device).half()
    out = torch.full(shape, float("nan"), dtype=x.dtype, device=device)
    assert_close(kernel.hadamard_quantize(x, code=None, out=out).y, transform(x.double()), x.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_hadamard_slices__static_scales(kind, device):
    x = torch.randn(3, 3584, device=device)
    scale, more, rows = row_scales(kind, 3, device, 0.02, 0.04)
    out = torch.full(x.shape, 77, dtype=torch.int8, device=device)
    got = kernel.hadamard_quantize(x, scale, out=out, **more).y
    off = (got.int() - torch.round(transform(x) / rows[:, None]).clamp(-128, 127).int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 2e-3


def test_hadamard_slices__behind_a_gated_mlp(device):
    gate, up = torch.randn(2, 2 * 5120, device=device).half().chunk(2, 1)
    y = kernel.hadamard_quantize(gate, up=up, code=None).y
    assert_close(y, transform((F.silu(gate) * up).double()), torch.float16)


@pytest.mark.gpu
def test_hadamard_slices__bfloat16(device):
    x = torch.randn(2, 18944, device=device).bfloat16()
    assert_close(kernel.hadamard_quantize(x, code=None).y, transform(x.double()), torch.bfloat16)


def test_hadamard_slices__only_where_rows_are_few():
    plans = pytest.importorskip("mmqc.kernels.hadamard.hadamard_plan")
    x = torch.empty(1, 18944)
    t = plans.best_tiling(18944)
    programs = slices.slices(t)
    assert programs == (10, 4)
    room = slices.WAVES * slices.multiprocessors(x.device)
    assert slices.few(x, t) == (room >= 40)
    assert not slices.few(torch.empty(room, 2048), plans.best_tiling(2048))
    assert not slices.few(torch.empty(1, 64), plans.best_tiling(64))
