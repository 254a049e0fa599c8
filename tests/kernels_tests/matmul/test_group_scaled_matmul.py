"""The Triton kernels with a scale per group against the plain-torch op, at odd sizes, float and integer scales."""

import pytest
import torch
from row_scales import KINDS, row_scales
from tolerance import assert_close

from mmqc.ops.pack import pack_int4
from mmqc.ops.scaled_matmul import reference

grouped = pytest.importorskip("mmqc.kernels.matmul.group_scaled_matmul")
on_cuda = pytest.importorskip("mmqc.kernels.on_cuda")
unpack_weight = pytest.importorskip("mmqc.kernels.matmul.unpack_weight").unpack_weight
configs = pytest.importorskip("mmqc.kernels.matmul.configs")
Config = configs.MatmulConfig

TILES = {
    "columns": Config(16, 32, 64, 4, 2, group_m=2, variant="columns"),
    "split": Config(16, 32, 32, 4, 2, split_k=3, variant="columns"),
    "nested": Config(32, 32, 64, 4, 2, group_m=2, variant="nested"),
    "halves": Config(128, 128, 64, 4, 2, variant="nested"),
    "unpack": Config(32, 32, 32, 4, 2, variant="unpack"),
}
# (M, N, K, g): aligned; halves of a packed row that end within a group; K no multiple of g, nor of the tile
SHAPES = [(17, 27, 256, 64), (1, 27, 128, 32), (3, 40, 100, 64), (70, 27, 96, 32), (5, 1, 31, 128), (3, 33, 160, 48)]


def operands(m, n, k, g, bits, integer, device):
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8, device=device)
    w = pack_int4(codes) if bits == 4 else codes
    t = torch.randint(-300, 1000, (n, -(-k // g)), dtype=torch.int32, device=device)
    w_scale = torch.rand(n, device=device) + 0.5 if integer else t / 1024
    return x, w, w_scale, t if integer else None, torch.randn(n, device=device)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("variant", TILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_group_scaled_matmul__equals_the_op(shape, variant, bits, integer, device):
    m, n, k, g = shape
    x, w, w_scale, t, bias = operands(m, n, k, g, bits, integer, device)
    x_scale = torch.rand(1, device=device) * 0.01
    out = torch.full((m, n), float("nan"), device=device)
    y = grouped.group_scaled_matmul(
        x, w, x_scale, w_scale, bias, group_size=g, group_scale=t, out=out, out_dtype=torch.float32, config=TILES[variant]
    )
    assert y is out
    assert_close(y, reference(x, w, x_scale, w_scale, bias, None, bits, torch.float32, t, g))


@pytest.mark.parametrize("variant", ["columns", "split", "nested", "halves"])
def test_group_scaled_matmul__integer_sums_are_exact(variant, device):
    """With unit scales the float32 result is the rounded int32 sum, to the bit, however K is split."""
    x, w, _, t, _ = operands(9, 20, 512, 64, 8, True, device)
    one = torch.ones(1, device=device)
    y = grouped.group_scaled_matmul(
        x, w, one, one.expand(20).contiguous(), group_size=64, group_scale=t, out_dtype=torch.float32, config=TILES[variant]
    )
    exact = x.double() @ (w.double() * t.double().repeat_interleave(64, 1)).t()
    assert torch.equal(y, exact.float())


@pytest.mark.parametrize("bits", [8, 4])
def test_group_scaled_matmul__sums_up_to_the_end_of_int32(bits, device):
    """Nothing on the way is larger than the proved bound: no factor of 16 in packed codes."""
    k, g, top = 256, 64, 2 ** (bits - 1)
    x = torch.full((2, k), -128, dtype=torch.int8, device=device)
    codes = torch.full((16, k), -top, dtype=torch.int8, device=device)
    scale = (2**31 - 1) // (128 * top * k)
    t = torch.full((16, k // g), scale, dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    y = grouped.group_scaled_matmul(
        x,
        pack_int4(codes) if bits == 4 else codes,
        one,
        one.expand(16).contiguous(),
        group_size=g,
        group_scale=t,
        out_dtype=torch.float32,
        config=Config(16, 16, 64, 4, 2, variant="columns"),
    )
    assert (y == float(128 * top * k * scale)).all()
    assert y.max() > 0.98 * 2**31


@pytest.mark.parametrize("variant", ["columns", "nested"])
@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_group_scaled_matmul__small_integer_scales(shape, rows, variant, device, monkeypatch):
    """Below ``FOLD_ROWS`` group by group, from there on one product of codes times scales: the same integers."""
    monkeypatch.setattr(grouped, "FOLD_ROWS", rows)
    m, n, k, g = shape
    x, w, w_scale, _, bias = operands(m, n, k, g, 4, True, device)
    t = torch.randint(-15, 16, (n, -(-k // g)), dtype=torch.int8, device=device)
    x_scale = torch.rand(1, device=device) * 0.01
    out = torch.full((m, n), float("nan"), device=device)
    grouped.group_scaled_matmul(
        x, w, x_scale, w_scale, bias, group_size=g, group_scale=t, out=out, out_dtype=torch.float32, config=TILES[variant]
    )
    assert_close(out, reference(x, w, x_scale, w_scale, bias, None, 4, torch.float32, t, g))
    again = grouped.group_scaled_matmul(
        x, w, x_scale, w_scale, bias, group_size=g, group_scale=t.int(), out_dtype=torch.float32, config=TILES[variant]
    )
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 300, 512, 3000])
def test_group_scaled_matmul__small_integer_scales_on_the_gpu(m, device):
    x, w, w_scale, _, bias = operands(m, 640, 1024, 128, 4, True, device)
    t = torch.randint(-15, 16, (640, 8), dtype=torch.int8, device=device)
    x_scale = torch.rand(1, device=device) * 0.01
    y = grouped.group_scaled_matmul(x, w, x_scale, w_scale, bias, group_size=128, group_scale=t, out_dtype=torch.float32)
    assert_close(y, reference(x, w, x_scale, w_scale, bias, None, 4, torch.float32, t, 128))


def test_group_scaled_matmul__small_integer_scales_at_the_end_of_8_bits(device):
    codes = torch.tensor([-8, 7], dtype=torch.int8, device=device).repeat(16, 48)
    t = torch.tensor([[15, -15, 1]], dtype=torch.int8, device=device).repeat(16, 1)
    whole = unpack_weight(pack_int4(codes), 96, bits=4, scale=t, group_size=32)
    assert torch.equal(whole, (codes.int() * t.int().repeat_interleave(32, 1)).to(torch.int8))
    assert whole.min() == -120
    assert whole.max() == 120


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("integer", [False, True])
def test_group_scaled_matmul__scale_of_every_kind(kind, integer, device):
    m, n, k, g = 37, 45, 128, 64
    x, w, w_scale, t, _ = operands(m, n, k, g, 8, integer, device)
    scale, more, rows = row_scales(kind, m, device, 0.0, 0.01)
    out = torch.full((m, n), float("nan"), dtype=torch.float16, device=device)
    w_scale = w_scale * 1e-3 if integer else w_scale
    grouped.group_scaled_matmul(
        x, w, scale, w_scale, group_size=g, group_scale=t, out_dtype=torch.float16, out=out, config=TILES["columns"], **more
    )
    wide = (w_scale[:, None] * t if integer else w_scale).double().repeat_interleave(g, 1)
    assert_close(out, rows.double()[:, None] * (x.double() @ (w.double() * wide).t()), torch.float16)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(1, 130, 256), (70, 100, 384), (300, 40, 256)])
def test_group_scaled_matmul__config_of_the_table(shape, bits, integer, device):
    m, n, k = shape
    x, w, w_scale, t, bias = operands(m, n, k, 128, bits, integer, device)
    scale = torch.rand(1, device=device) * 0.01
    y = grouped.group_scaled_matmul(x, w, scale, w_scale, bias, group_size=128, group_scale=t, out_dtype=torch.float32)
    assert_close(y, reference(x, w, scale, w_scale, bias, None, bits, torch.float32, t, 128))


@pytest.mark.parametrize("integer", [False, True, "int8"])
@pytest.mark.parametrize("rows", [(2, 3), (70,)])
@pytest.mark.parametrize("widths", [(40, 16, 24), (33, 70)])
def test_group_scaled_matmul__several_linears(widths, rows, integer, device, monkeypatch):
    monkeypatch.setattr(grouped, "FOLD_ROWS", 64)
    x = torch.randint(-128, 128, (*rows, 128), dtype=torch.int8, device=device)
    parts = [operands(1, n, 128, 32, 4, integer, device)[1:] for n in widths]
    w, w_scale, t, bias = map(list, zip(*parts, strict=True))
    t = [(s % 31 - 15).to(torch.int8) for s in t] if integer == "int8" else t
    x_scale, visual = torch.rand(2, device=device) * 0.01, torch.rand(rows[-1], device=device) < 0.5
    got = on_cuda.scaled_matmuls(x, w, x_scale, w_scale, bias, visual, 4, torch.float32, t if integer else None, 32)
    for i, y in enumerate(got):
        args = (x, w[i], x_scale, w_scale[i], bias[i], visual, 4, torch.float32, t[i], 32)
        assert_close(y, reference(*args))
        assert on_cuda.why_not_scaled(x, w[i], w_scale[i], bias[i], 4, torch.float32, t[i], 32) is None
        assert_close(on_cuda.scaled_matmul(*args), reference(*args))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"t": lambda t: t.float()}, "contiguous torch.int32"),
        ({"t": lambda t: t[:, :1]}, r"group scales are \[16, 2\]"),
        ({"w": lambda w: w.float()}, "w_q is"),
        ({"x": lambda x: x.float()}, "sums of int8 products"),
    ],
)
def test_group_scaled_matmul__names_what_is_wrong(change, why, device):
    x, w, w_scale, t, _ = operands(4, 16, 64, 32, 8, True, device)
    given = {name: change.get(name, lambda v: v)(v) for name, v in {"x": x, "w": w, "t": t}.items()}
    one = torch.ones(1, device=device)
    with pytest.raises(ValueError, match=why):
        grouped.group_scaled_matmul(given["x"], given["w"], one, w_scale, group_size=32, group_scale=given["t"])
