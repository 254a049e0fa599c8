"""quantize against the plain-torch op: every code equal."""

import offline
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from poison import poisoned
from row_scales import KINDS, row_scales

from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops import quantize

kernel = pytest.importorskip("mmqc.kernels.rows.quantize")
SHAPES = [(5, 64), (3, 100), (1, 27), (33, 1), (2, 1280), (17, 3420)]


def made(width: str, visual: str):
    """A launch in bfloat16, for offline.py, whose process has no device."""
    kernel.why_not_here = lambda *tensors: None
    x = torch.zeros(64, int(width), dtype=torch.bfloat16)
    scales = row_scale(torch.ones(2), 64, torch.zeros(64).bool()) if visual == "True" else row_scale(torch.ones(1), 64)
    return kernel.plan(x, scales, new=poisoned(x)).launches[0]


def quantized(x, scale, bits=8, code=torch.int8, **rows):
    return kernel.plan(x, row_scale(scale, len(x), **rows), bits, code, poisoned(x)).run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantize__equals_the_op(shape, kind, dtype, device):
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    scale, more, rows = row_scales(kind, shape[0], device)
    want = torch.round(x.float() / rows[:, None]).clamp(-128, 127).to(torch.int8)
    assert torch.equal(quantized(x, scale, **more), want)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the same device for all
@given(rows=st.integers(1, 40), width=st.integers(1, 300), bits=st.integers(2, 8), step=st.floats(1e-3, 1e3))
def test_quantize__any_size_and_number_of_bits(rows, width, bits, step, device):
    x, scale = torch.randn(rows, width, device=device) * 100, torch.tensor([step], device=device)
    assert torch.equal(quantized(x, scale, bits), quantize.reference(x, scale, None, bits))


def test_quantize__ties_and_ends(device):
    """Halves go to the even code."""
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e30, -1e30]], device=device)
    got = quantized(torch.cat((x, 0.125 * x)), torch.tensor([1.0, 0.125], device=device))
    want = [0, 2, 2, 0, -2, 126, 127, 127, -128]
    assert got.tolist() == [want, want]


def test_quantize__rows_of_longer_rows(device):
    x, scale = torch.randn(9, 200, device=device)[:, :100], torch.tensor([0.02], device=device)
    assert torch.equal(quantized(x, scale), quantize.reference(x, scale, None, 8))


@pytest.mark.parametrize(
    ("width", "tile"), [(1280, 256), (3584, 512), (5120, 1024), (18944, 512), (4096, 2048), (100, 128), (2000, 2048)]
)
def test_quantize__tiles_cover_rows_with_little_beside_them(width, tile):
    assert kernel.width_of_tile(width) == tile


@pytest.mark.parametrize(
    ("x", "more", "reason"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), {}, "x is one of"),
        (torch.zeros(2, 3, 4), {}, "x is a matrix"),
        (torch.zeros(4, 6).t(), {}, "rows of x are contiguous"),
        (torch.zeros(2, 3), {"bits": 9}, "bits = 9"),
        (torch.zeros(2, 3), {"code": torch.int16}, "codes are one of"),
    ],
)
def test_quantize__refusals(x, more, reason):
    assert reason in kernel.why_not(x, **more)


@pytest.mark.parametrize("visual", [False, True])
def test_quantize__a_thread_reads_eight_and_stores_sixteen_side_by_side(visual):
    code = offline.instructions("test_quantize", 1280, visual)
    assert code.count("LDG.E.128") == 2 * code.count("STG.E.128") > 0
    assert "STG.E.U8" not in code
