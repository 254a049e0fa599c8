"""hadamard_quantize against the plain-torch ops hadamard and quantize."""

import device_facts
import offline
import pytest
import torch
from poison import poisoned
from row_scales import KINDS, row_scales
from tolerance import assert_close
from torch.nn import functional as F

from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops import hadamard, quantize

kernel = pytest.importorskip("mmqc.kernels.hadamard.hadamard_quantize")
plans = pytest.importorskip("mmqc.kernels.hadamard.hadamard_plan")

# h and A h are rounded to x's dtype: in fp16 a few codes in a hundred may fall on the other side.
RATE = {torch.float32: 2e-3, torch.float16: 5e-2}
SHAPES = [(5, 64), (3, 1280), (2, 3584), (70, 27), (1, 5120), (3, 12 * 16), (1, 18944), (4, 1), (2, 4304), (3, 2048)]


def hadamard_quantize(x, scale=None, up=None, bits=8, **rows):
    """Codes, or without scales y."""
    scales, code = (None, None) if scale is None else (row_scale(scale, len(x), **rows), torch.int8)
    return kernel.plan(x, up, plans.hadamard_plan, scales, bits, code, poisoned(x)).run()


def transform(x):
    return hadamard.reference(x, [f.to(x.device) for f in hadamard.hadamard_factors(x.shape[1])])


def here(dtype, device):
    """Float32 is the interpreter's alone: on a device torch transforms such rows."""
    if dtype not in kernel.DTYPES:
        pytest.skip(f"{dtype} rows have no kernel on {device.type}")
    return dtype


def assert_codes(actual, expected, rate):
    off = (actual.int() - expected.int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() <= rate + 1.5 / off.numel()


@pytest.mark.parametrize("cut", [(20, 64), (40, 32), (28, 128)])
def test_hadamard_quantize__with_another_cut(cut, device):
    x = torch.randn(5, cut[0] * cut[1], device=device).half()
    matrices = plans.hadamard_plan(x.shape[1], x.device, x.dtype, cut)
    assert (matrices.tiling.a, matrices.tiling.b) == cut
    y = kernel.plan(x, None, lambda *_: matrices, new=poisoned(x)).run()
    assert_close(y, transform(x.double()), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_hadamard__equals_the_op(shape, dtype, device):
    x = torch.randn(shape, device=device).to(here(dtype, device))
    assert_close(hadamard_quantize(x), transform(x.double()), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 64), (3, 1280), (3, 5120), (70, 27)])
def test_hadamard_quantize__static(shape, kind, dtype, device):
    x = torch.randn(shape, device=device).to(here(dtype, device))
    scale, more, rows = row_scales(kind, shape[0], device, 0.02, 0.04)
    expected = torch.round(transform(x.float()) / rows[:, None]).clamp(-128, 127)
    assert_codes(hadamard_quantize(x, scale, **more), expected, RATE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(5, 192), (2, 3584), (2, 5120)])
def test_hadamard_quantize__behind_a_gated_mlp(shape, dtype, device):
    gate_up = torch.randn(shape[0], 2 * shape[1], device=device).to(here(dtype, device))
    gate, up = gate_up.chunk(2, 1)
    y = hadamard_quantize(gate, up=up)
    assert_close(y, transform((F.silu(gate) * up).double()), dtype)
    scale = torch.tensor([0.02], device=device)
    got = hadamard_quantize(gate, scale, up=up)
    assert_codes(got, quantize.reference(transform((F.silu(gate) * up).float()), scale, None, 8), RATE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(33, 3584), (5, 18944), (9, 5120), (4, 4304)])
def test_hadamard__bfloat16(shape, device):
    x = torch.randn(shape, device=device).bfloat16()
    assert_close(hadamard_quantize(x), transform(x.double()), torch.bfloat16)


def test_hadamard_quantize__names_what_is_wrong(device):
    x = torch.randn(2, 64, device=device).half()
    with pytest.raises(ValueError, match="up is like x"):
        hadamard_quantize(x, up=x[:1])
    with pytest.raises(ValueError, match="bits = 4"):
        hadamard_quantize(x, bits=4)
    with pytest.raises(ValueError, match="float64 activations are transformed in float32 or wider"):
        hadamard_quantize(x.double())


def made(architecture, n, gated):
    """Whole rows on another device, for offline.py."""
    from mmqc.kernels.hadamard.hadamard_tiles import Written

    with device_facts.pretending(int(architecture)):
        x = torch.empty(4096, int(n), dtype=torch.bfloat16)
        up = x if gated == "True" else None
        tiling = plans.best_tiling.__wrapped__(int(n), x.device)
        assert not isinstance(tiling, str), tiling
        matrices = plans.hadamard_plan.__wrapped__(int(n), x.device, x.dtype, (tiling.a, tiling.b))
        return kernel.rows_launch(x, up, Written(torch.empty_like(x)), matrices, programs=132)


# Those of models first; then some whose tiles are the largest that there are, and small ones.
WIDTHS = [24576, 18944, 14336, 5056, 9728, 11264, 18176, 20224, 20736, 25856, 64, 4800]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.slow if n < 14336 or n > 24576 else ()) for n in WIDTHS])
@pytest.mark.parametrize("architecture", device_facts.SHARED)
def test_rows_launch__fits_the_shared_memory_of_every_device(architecture, n, gated):
    with device_facts.pretending(architecture):
        tiling = plans.best_tiling.__wrapped__(n)
    if isinstance(tiling, str):
        assert f"{device_facts.SHARED[architecture]} bytes of shared memory" in tiling
        assert n not in WIDTHS[1:3] or architecture == 86, "what models have is transformed by a kernel"
    else:
        assert (
            offline.shared_memory(architecture, "test_hadamard_quantize", architecture, n, gated)
            <= device_facts.SHARED[architecture]
        )


@pytest.mark.parametrize("count", [1, 8, 17])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(5, 64), (3, 1280), (7, 192), (70, 27), (2, 5120), (1, 18944), (2, 4304)])
def test_hadamard_quantize__beside_channels_that_are_kept(shape, gated, count, device):
    """Those are the transform's, and the codes are what they are without."""
    m, n = shape
    x, up = (torch.randn(m, 2 * n, device=device).half()[:, n:] for _ in range(2))
    kept, scale = torch.randint(0, n, (count,), device=device), torch.tensor([0.03], device=device)
    kept[-1] = n - 1
    up = up if gated else None
    q, some = kernel.plan_kept(x, up, plans.hadamard_plan, kept, row_scale(scale, m), new=poisoned(x)).run()
    assert torch.equal(q, hadamard_quantize(x, scale, up))
    y = hadamard_quantize(x, up=up)
    assert_close(some, y[:, kept].double(), torch.float16)
