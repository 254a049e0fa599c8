"""The kernel against the plain-torch op, with NaN-filled results and sizes that fill no tile."""

import pytest
import torch
from tolerance import assert_close

from mmqc.ops.mixed_matmul import reference
from mmqc.ops.pack import pack_int4
from mmqc.ops.quantize_per_token import reference as quantize

kernel = pytest.importorskip("mmqc.kernels.matmul.mixed_matmul")
MatmulConfig = kernel.MatmulConfig
scaled_matmul_epilogue = pytest.importorskip("mmqc.kernels.matmul.scaled_matmul_epilogue").scaled_matmul_epilogue
SIZES = [(1, 17, 48, 16), (63, 100, 96, 16), (37, 33, 160, 32), (65, 64, 112, 0)]


def problem(m, n, low, high, device, seed=0):
    """(x codes, scales, offsets), (w codes, scales, sums), widths, bits."""
    g = torch.Generator().manual_seed(seed)
    widths, bits = ([low, high], [4, 8]) if high else ([low], [4])
    x = quantize(torch.randn(m, low + high, generator=g) + 0.5, None, widths, bits)
    codes = [
        torch.randint(-(2 ** (b - 1)), 2 ** (b - 1), (n, k), dtype=torch.int8, generator=g)
        for k, b in zip(widths, bits, strict=True)
    ]
    scale = torch.rand(n, len(widths), generator=g) + 0.1
    sums = torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1)
    return (tuple(t.to(device) for t in x), ([c.to(device) for c in codes], scale.to(device), sums.to(device)), widths, bits)


def operands(x, w, widths):
    (q, s, o), (codes, scale, sums) = x, w
    return kernel.Rows(q, s, o), kernel.Weight(codes[0], codes[1] if len(widths) == 2 else None, scale, sums)


def assert_right(y, x, weight, expected):
    """To half a step of the high parts, which the kernel rounds to once, and to the rounding of float32 and of y."""
    once = 0.5 * x.scale[:, -1:].double() * weight.scale[:, -1].double() if weight.high is not None else 0.0
    rounding = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[y.dtype]
    error, allowed = (y.double() - expected).abs(), expected.abs() + 1e-2 * expected.abs().amax()
    assert bool((error <= 1.001 * once + rounding * allowed).all()), float((error / expected.abs().amax()).max())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed_matmul_kernel__equals_the_op(size, dtype, device):
    m, n, low, high = size
    x, w, widths, bits = problem(m, n, low, high, device)
    bias = torch.randn(n, device=device) if m % 2 else None
    out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
    rows, weight = operands(x, w, widths)
    assert kernel.mixed_matmul(rows, weight, bias, out=out, out_dtype=dtype) is out
    stored = [pack_int4(w[0][0]), *w[0][1:]]
    expected = reference(*x, stored, w[1], w[2], bias, widths, bits, torch.float64)
    assert_right(out, rows, weight, expected)


@pytest.mark.parametrize("with_bias", [False, True])
def test_mixed_matmul__one_part_is_a_linear_with_a_term_of_rank_1(with_bias, device):
    """What Hopper's tiles are given, here by a tile of the interpreter's."""
    x, w, widths, bits = problem(37, 33, 112, 0, device)
    bias = torch.randn(33, device=device) if with_bias else None
    rows, weight = operands(x, w, widths)
    y = torch.full((37, 33), float("nan"), device=device)
    linear, scale, epilogue = kernel.as_scaled(rows, weight, bias, y)
    scaled_matmul_epilogue(rows.q, [linear], scale, epilogue, MatmulConfig(32, 32, 32, 4, 1, variant="nested"))
    expected = reference(*x, [pack_int4(w[0][0])], w[1], w[2], bias, widths, bits, torch.float64)
    assert_right(y, rows, weight, expected)
    with pytest.raises(ValueError, match="weights in one part"):
        kernel.as_scaled(*operands(*problem(5, 7, 48, 16, device)[:2], [48, 16]), None, y)


@pytest.mark.parametrize("low", [64, 128, 144, 256])
def test_mixed_matmul_kernel__packed_weights(low, device):
    """As the op has them: written out, the second part starts at a step of K."""
    x, (codes, scale, sums), widths, bits = problem(40, 48, low, 16, device)
    weight = kernel.Weight(pack_int4(codes[0]), codes[1], scale, sums)
    both = weight.written_out(low)
    assert (both.high, both.joined) == (None, low)
    assert torch.equal(both.low[:, :low], codes[0])
    assert torch.equal(both.low[:, -16:], codes[1])
    assert not both.low[:, low:-16].any()
    wanted = torch.stack((scale[:, 0] / scale[:, 1], scale[:, 1], *(scale * sums).t()))
    assert_close(both.columns, wanted)
    expected = reference(*x, [pack_int4(codes[0]), codes[1]], scale, sums, None, widths, bits, torch.float64)
    tail = MatmulConfig(32, 32, 32, 4, 1, variant="descriptors", tail=16)
    for config in (None, tail):
        y = kernel.mixed_matmul(kernel.Rows(*x), weight, out_dtype=torch.float32, config=config)
        assert_right(y, kernel.Rows(*x), weight, expected)


def test_mixed_matmul_kernel__tokens_whose_parts_are_constant(device):
    """No low part, no high part, neither; a weight whose high rows are zero, with the step that the solver gives them."""
    widths, bits = [48, 16], [4, 8]
    x = torch.randn(6, 64) * 1e-3
    x[0, :48], x[1, 48:], x[2], x[3, :48] = 0.25, 3.0, 1.0, 0
    x = tuple(t.to(device) for t in quantize(x, None, widths, bits))
    _, (codes, scale, sums), *_ = problem(6, 32, 48, 16, device)
    codes[1][:5], sums[:5, 1], scale[:, 1] = 0, 0, scale[:, 0] / 32
    y = kernel.mixed_matmul(kernel.Rows(*x), kernel.Weight(*codes, scale, sums), out_dtype=torch.float32)
    expected = reference(*x, [pack_int4(codes[0]), codes[1]], scale, sums, None, widths, bits, torch.float64)
    assert_right(y, kernel.Rows(*x), kernel.Weight(*codes, scale, sums), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", kernel.TILES, ids=str)
@pytest.mark.parametrize("size", [(300, 520, 448, 64), (130, 260, 1120, 160), (129, 256, 3584, 512), (257, 272, 2368, 0)])
def test_mixed_matmul_kernel__every_tile(size, tile):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    m, n, low, high = size
    x, w, widths, bits = problem(m, n, low, high, "cuda")
    rows, weight = operands(x, w, widths)
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    stored = [pack_int4(w[0][0]), *w[0][1:]]
    expected = reference(*x, stored, w[1], w[2], None, widths, bits, torch.float64)
    for given in (weight, weight._replace(low=stored[0])):
        kernel.mixed_matmul(rows, given, out=out.fill_(float("nan")), config=tile)
        assert_right(out, rows, weight, expected)


def test_mixed_matmul_kernel__refuses(device):
    x, w, widths, _ = problem(5, 16, 48, 16, device)
    rows, weight = operands(x, w, widths)
    with pytest.raises(ValueError, match="48 \\+ 0 columns for 64"):
        kernel.mixed_matmul(rows, weight._replace(high=None))
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        kernel.mixed_matmul(rows._replace(q=rows.q[:, :56].contiguous()), weight._replace(low=weight.low[:, :40].contiguous()))
    with pytest.raises(ValueError, match="out is"):
        kernel.mixed_matmul(rows, weight, out=torch.empty(5, 17, device=device))
