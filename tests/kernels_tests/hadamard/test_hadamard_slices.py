"""hadamard_slices: few rows, several programs on each, against the plain-torch op."""

import pytest
import torch
from poison import poisoned
from row_scales import KINDS, row_scales
from tolerance import assert_close
from torch.nn import functional as F

from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops import hadamard

kernel = pytest.importorskip("mmqc.kernels.hadamard.hadamard_quantize")
slices = pytest.importorskip("mmqc.kernels.hadamard.hadamard_slices")
plans = pytest.importorskip("mmqc.kernels.hadamard.hadamard_plan")

SHAPES = [(1, 18944), (2, 5120), (3, 3584), (1, 4304), (2, 2048)]


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    monkeypatch.setattr(kernel, "few", lambda x, t: True)
    # whatever falls back to the other kernel fails
    monkeypatch.setattr(kernel, "hadamard_quantize_kernel", None)


def hadamard_quantize(x, scale=None, up=None, **rows):
    """Codes, or without scales y."""
    scales, code = (None, None) if scale is None else (row_scale(scale, len(x), **rows), torch.int8)
    return kernel.plan(x, up, plans.hadamard_plan, scales, 8, code, poisoned(x)).run()


def transform(x):
    return hadamard.reference(x, [f.to(x.device) for f in hadamard.hadamard_factors(x.shape[1])])


@pytest.mark.parametrize("shape", SHAPES)
def test_hadamard_slices__equals_the_op(shape, device):
    x = torch.randn(shape, device=device).half()
    assert_close(hadamard_quantize(x), transform(x.double()), x.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_hadamard_slices__static_scales(kind, device):
    x = torch.randn(3, 3584, device=device).to(torch.float32 if torch.float32 in kernel.DTYPES else torch.float16)
    scale, more, rows = row_scales(kind, 3, device, 0.02, 0.04)
    got = hadamard_quantize(x, scale, **more)
    off = (got.int() - torch.round(transform(x.float()) / rows[:, None]).clamp(-128, 127).int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < (2e-3 if x.dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("shape", SHAPES)
def test_hadamard_slices__beside_channels_that_are_kept(shape, device):
    x, (m, n) = torch.randn(shape, device=device).half(), shape
    kept, scale = torch.randint(0, n, (8,), device=device), torch.tensor([0.03], device=device)
    q, some = kernel.plan_kept(x, None, plans.hadamard_plan, kept, row_scale(scale, m), new=poisoned(x)).run()
    assert torch.equal(q, hadamard_quantize(x, scale))
    assert_close(some, transform(x.double())[:, kept], x.dtype)


def test_hadamard_slices__behind_a_gated_mlp(device):
    gate, up = torch.randn(2, 2 * 5120, device=device).half().chunk(2, 1)
    y = hadamard_quantize(gate, up=up)
    assert_close(y, transform((F.silu(gate) * up).double()), torch.float16)


@pytest.mark.gpu
def test_hadamard_slices__bfloat16(device):
    x = torch.randn(2, 18944, device=device).bfloat16()
    assert_close(hadamard_quantize(x), transform(x.double()), torch.bfloat16)


def test_hadamard_slices__only_where_rows_are_few():
    x = torch.empty(1, 18944)
    t = plans.best_tiling(18944)
    programs = slices.slices(t)
    assert programs == (10, 4)
    room = slices.WAVES * slices.multiprocessors(x.device)
    assert slices.few(x, t) == (room >= 40)
    assert not slices.few(torch.empty(room, 2048), plans.best_tiling(2048))
    assert not slices.few(torch.empty(1, 64), plans.best_tiling(64))
