"""Activation, gate and the next quantization in the epilogue, against the plain-torch op: all activations, odd sizes, every kernel."""

import pytest
import torch
from row_scales import row_scales
from tolerance import TOLERANCE, assert_close

from mmqc.ops import quantize as quantize_op
from mmqc.ops.pack import pack_int4
from mmqc.ops.scaled_matmul_epilogue import ACTIVATIONS, reference

kernel = pytest.importorskip("mmqc.kernels.scaled_matmul_epilogue")
scaled = pytest.importorskip("mmqc.kernels.scaled_matmul")
on_cuda = pytest.importorskip("mmqc.kernels.on_cuda")
tiles = pytest.importorskip("mmqc.kernels.epilogue_tiles")
Config = pytest.importorskip("mmqc.kernels.configs").MatmulConfig

TILES = {
    "rows": Config(16, 32, 32, 4, 2, group_m=2),
    "columns": Config(16, 32, 32, 4, 2, group_m=2, variant="columns"),
    "split": Config(16, 32, 32, 4, 2, split_k=3, variant="columns"),
    "nested": Config(32, 32, 32, 4, 2, group_m=2, variant="nested"),
    "unpack": Config(32, 64, 32, 4, 2, variant="unpack"),
}
SHAPES = [(17, 33, 100), (1, 27, 31), (50, 70, 128)]
WAYS = [
    ("one", "rows"),
    ("one", "nested"),
    ("visual", "split"),
    ("visual", "nested"),
    ("split", "columns"),
    ("row", "rows"),
]


def operands(m, n, k, bits, linears, device, bias=True):
    """x_q, weights, their scales, biases; z is about as large as one."""
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
    top = 2 ** (bits - 1)
    codes = [torch.randint(-top, top, (n, k), dtype=torch.int8, device=device) for _ in range(linears)]
    scales = [(torch.rand(n, device=device) + 0.5) / (20 * top * k**0.5) for _ in codes]
    w = [c if bits == 8 else pack_int4(c) for c in codes]
    return x, w, scales, [torch.randn(n, device=device) if bias else None for _ in codes]


def run(x, w, w_scale, bias, x_scale, activation, tile, dtype=torch.float32, codes=None, bits=8, **rows):
    """The launch, into y filled with what no result is."""
    m, n = x.shape[0], w[0].shape[0]
    y = torch.full((m, n), float("nan") if codes is None else -77, dtype=dtype if codes is None else torch.int8,
                   device=x.device)  # fmt: skip
    linears = [scaled.Linear(*parts, y) for parts in zip(w, w_scale, bias, strict=True)]
    epilogue = tiles.Epilogue(activation, dtype, codes, bits)
    kernel.scaled_matmul_epilogue(x, linears, scaled.row_scale(x_scale, m, **rows), epilogue, TILES[tile])
    return y


def assert_codes(got, h, scale, bits=8):
    """Codes of h; where a quotient lies next to a tie, either neighbour."""
    top = 2 ** (bits - 1)
    quotient = (h.double() / scale.double()).clamp(-top, top - 1)
    off = (got.double() - quotient).abs()
    assert -top <= int(got.min()) <= int(got.max()) < top
    assert (off <= 0.5 + TOLERANCE[h.dtype][0] * (1 + quotient.abs())).all()


@pytest.mark.parametrize("linears", [1, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_scaled_matmul_epilogue__every_activation(activation, linears, device):
    x, w, w_scale, bias = operands(37, 45, 96, 8, linears, device)
    x_scale = torch.ones(1, device=device)
    want = reference(x, w, x_scale, w_scale, bias, None, 8, torch.float32, activation)
    assert 1 < want.abs().max() < 100
    assert_close(run(x, w, w_scale, bias, x_scale, activation, "rows"), want)
    half = reference(x, w, x_scale, w_scale, bias, None, 8, torch.float16, activation)
    got = run(x, w, w_scale, bias, x_scale, activation, "rows", torch.float16)
    assert_close(got, half, torch.bfloat16 if activation == "quick_gelu" else None)  # which fp16 rounds three times


@pytest.mark.parametrize("linears", [1, 2])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scaled_matmul_epilogue__every_kernel(shape, tile, bits, linears, device):
    if tile == "unpack" and bits == 8:
        pytest.skip("nothing to unpack")
    x, w, w_scale, bias = operands(*shape, bits, linears, device, bias=shape[0] > 1)
    x_scale = torch.ones(1, device=device)
    want = reference(x, w, x_scale, w_scale, bias, None, bits, torch.float32, "gelu")
    assert_close(run(x, w, w_scale, bias, x_scale, "gelu", tile), want)


@pytest.mark.parametrize("linears", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kind", "tile"), WAYS)
def test_scaled_matmul_epilogue__next_codes(kind, tile, dtype, linears, device):
    m = 37
    x, w, w_scale, bias = operands(m, 45, 100 if tile == "rows" else 96, 8, linears, device)
    scale, more, x_rows = row_scales(kind, m, device, 0.5, 1.5)
    next_scale, next_more, rows = row_scales(kind, m, device)
    codes = scaled.row_scale(next_scale, m, **next_more)
    got = run(x, w, w_scale, bias, scale, "silu", tile, dtype, codes, **more)
    z = [(x.double() @ v.double().t() * x_rows.double()[:, None] * s.double() + b.double()).float().to(dtype)
         for v, s, b in zip(w, w_scale, bias, strict=True)]  # fmt: skip
    h = torch.nn.functional.silu(z[0]) * (z[1] if linears == 2 else 1)
    assert_codes(got, h, rows[:, None])
    assert got.unique().numel() > 30


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scaled_matmul_epilogue__codes_of_few_bits_and_saturation(bits, device):
    x, w, w_scale, bias = operands(9, 30, 64, 8, 1, device)
    scale = torch.full((1,), 0.02, device=device)
    codes = scaled.row_scale(scale, 9)
    got = run(x, w, w_scale, bias, torch.ones(1, device=device), "none", "rows", codes=codes, bits=bits)
    z = reference(x, w, torch.ones(1, device=device), w_scale, bias, None, 8, torch.float32, "none")
    assert_codes(got, z, scale, bits)
    assert (got == -(2 ** (bits - 1))).any() or bits == 8


def test_scaled_matmul_epilogue__split_leaves_its_counters_at_zero(device):
    from mmqc.kernels import split_k

    x, w, w_scale, bias = operands(7, 64, 512, 8, 2, device)
    one = torch.ones(1, device=device)
    ys = [run(x, w, w_scale, bias, one, "silu", "split") for _ in range(3)]
    assert torch.equal(ys[0], ys[1])
    assert torch.equal(ys[0], ys[2])
    assert not split_k._counters[x.device].any()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (7,), (2, 150)])
@pytest.mark.parametrize("linears", [1, 2])
def test_scaled_matmul_epilogue__op_on_any_leading_axes(linears, shape, bits, masked, device):
    x, w, w_scale, bias = operands(torch.Size(shape).numel(), 40, 96, bits, linears, device)
    x = x.view(*shape, 96)
    scale, next_scale = ((torch.rand(1 + masked, device=device) + 0.5) * f for f in (1, 0.02))
    visual = torch.rand(shape[-1], device=device) < 0.5 if masked else None
    args = (x, w, scale, w_scale, bias, visual, bits, torch.float32, "gelu_tanh")
    assert on_cuda.why_not_epilogue(x, w, w_scale, bias, bits, torch.float32) is None
    h = reference(*args)
    assert_close(on_cuda.scaled_matmul_epilogue(*args), h)
    got = on_cuda.scaled_matmul_epilogue(*args, next_scale, visual, 8)
    assert_codes(got, h, quantize_op.row_scale(next_scale, visual))


def test_scaled_matmul_epilogue__what_no_kernel_takes_goes_to_the_parts(device):
    x, w, w_scale, bias = operands(4, 16, 32, 8, 2, device)
    one = torch.ones(1, device=device)
    for dtype, biases, why in (
        (torch.float64, bias, "out_dtype is one of"),
        (torch.float32, [bias[0], None], "a bias"),
    ):
        assert why in on_cuda.why_not_epilogue(x, w, w_scale, biases, 8, dtype)
        args = (x, w, one, w_scale, biases, None, 8, dtype, "silu")
        assert_close(on_cuda.scaled_matmul_epilogue(*args), reference(*args))
    wide = [torch.cat((v, v), 1)[:, :32] for v in w]
    assert "equally far" in on_cuda.why_not_epilogue(x, [w[0], wide[0]], w_scale, bias, 8, torch.float32)
