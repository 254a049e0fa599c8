"""The Triton kernels of scaled_matmul against the plain-torch op, at odd sizes, with every kind of scale."""

import pytest
import torch
from row_scales import KINDS, row_scales
from tolerance import assert_close

from mmqc.ops.pack import pack_int4
from mmqc.ops.scaled_matmul import reference

scaled_matmul = pytest.importorskip("mmqc.kernels.matmul.scaled_matmul")
configs = pytest.importorskip("mmqc.kernels.matmul.configs")
Config = configs.MatmulConfig

SMALL = {
    "rows": Config(16, 32, 32, 4, 2, group_m=2),
    "columns": Config(16, 32, 32, 4, 2, group_m=2, variant="columns"),
    "split": Config(16, 32, 32, 4, 2, split_k=3, variant="columns"),
    "split_rows": Config(16, 16, 32, 4, 2, split_k=5),
    "descriptors": Config(32, 32, 32, 4, 2, group_m=2, variant="descriptors"),
    "tail": Config(32, 32, 32, 4, 2, group_m=2, variant="nested", tail=16),
}
SHAPES = [(17, 33, 100), (1, 40, 96), (5, 27, 31), (50, 70, 128), (3, 1, 1)]


def operands(m, n, k, bits, device):
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=device) if bits == 4 else None
    w = torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device) if codes is None else pack_int4(codes)
    return x, w, torch.rand(n, device=device) + 0.5, torch.randn(n, device=device)


def nan(*shape, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("variant", SMALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_scaled_matmul__equals_the_op(shape, variant, bits, device):
    m, n, k = shape
    x, w, w_scale, bias = operands(m, n, k, bits, device)
    x_scale = torch.rand(1, device=device) * 0.01
    out = nan(m, n, dtype=torch.float32, device=device)
    y = scaled_matmul.scaled_matmul(x, w, x_scale, w_scale, bias, out_dtype=torch.float32, out=out, config=SMALL[variant])
    assert y is out
    assert_close(y, reference(x, w, x_scale, w_scale, bias, None, bits, torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["rows", "columns", "split", "descriptors", "tail"])
def test_scaled_matmul__scale_of_every_kind(kind, variant, device):
    m, n, k = 37, 45, 96
    x, w, w_scale, _ = operands(m, n, k, 8, device)
    scale, more, rows = row_scales(kind, m, device, 0.0, 0.01)
    out = nan(m, n, dtype=torch.float16, device=device)
    scaled_matmul.scaled_matmul(x, w, scale, w_scale, out_dtype=torch.float16, out=out, config=SMALL[variant], **more)
    expected = (x.double() @ w.double().t()) * rows.double()[:, None] * w_scale.double()
    assert_close(out, expected, torch.float16)


@pytest.mark.parametrize("variant", ["rows", "columns", "split"])
def test_scaled_matmul__views(variant, device):
    m, n, k = 19, 34, 64
    x, w, w_scale, bias = operands(m, n, k, 8, device)
    wide = torch.cat((x, x), 1)  # rows of x may be part of longer rows
    x_scale = torch.rand(m, device=device) * 0.01
    y = scaled_matmul.scaled_matmul(wide[:, :k], w, x_scale, w_scale, bias, out_dtype=torch.float32, config=SMALL[variant])
    acc = (x.double() @ w.double().t()) * x_scale.double()[:, None] * w_scale.double()
    assert_close(y, acc + bias.double(), torch.float32)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(1, 130, 300), (70, 100, 64)])
def test_scaled_matmul__config_of_the_table(shape, bits, device):
    m, n, k = shape
    x, w, w_scale, bias = operands(m, n, k, bits, device)
    scale = torch.rand(1, device=device) * 0.01
    y = scaled_matmul.scaled_matmul(x, w, scale, w_scale, bias, out_dtype=torch.float32)
    assert_close(y, reference(x, w, scale, w_scale, bias, None, bits, torch.float32))


def test_scaled_matmul__unpacked_once(device):
    x, w, w_scale, bias = operands(20, 48, 65, 4, device)
    scale = torch.rand(1, device=device) * 0.01
    config = Config(16, 32, 32, 4, 2, variant="unpack")
    y = scaled_matmul.scaled_matmul(x, w, scale, w_scale, bias, out_dtype=torch.float32, config=config)
    assert_close(y, reference(x, w, scale, w_scale, bias, None, 4, torch.float32))


def test_scaled_matmul__largest_sums_are_exact(device):
    k = 4096
    x = torch.full((2, k), -128, dtype=torch.int8, device=device)
    w = torch.full((16, k), -8, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    config = Config(16, 16, 256, 4, 2, variant="columns")
    y = scaled_matmul.scaled_matmul(x, pack_int4(w), one, one.expand(16).contiguous(), out_dtype=torch.float32, config=config)
    assert (y == 1024.0 * k).all()


def test_scaled_matmul__split_is_reproducible_and_leaves_its_counters_at_zero(device):
    from mmqc.kernels.shared import split_k

    x, w, w_scale, _ = operands(7, 64, 512, 8, device)
    scale = torch.rand(7, device=device)
    config = Config(16, 32, 32, 4, 2, split_k=4, variant="columns")
    ys = [scaled_matmul.scaled_matmul(x, w, scale, w_scale, out_dtype=torch.float32, config=config) for _ in range(3)]
    assert torch.equal(ys[0], ys[1])
    assert torch.equal(ys[0], ys[2])
    assert not split_k._counters[x.device, False].any()


def test_scaled_matmul__fp8(device):
    fp8 = torch.float8_e4m3fn
    m, n, k = 19, 35, 96
    x, w = (torch.randn(r, k, device=device).clamp(-4, 4).to(fp8) for r in (m, n))
    scale, w_scale = torch.rand(1, device=device), torch.rand(n, device=device)
    if scaled_matmul.supports(x, w, w_scale, None, torch.float32):
        pytest.skip("no fp8 on this device")
    y = scaled_matmul.scaled_matmul(x, w, scale, w_scale, out_dtype=torch.float32, config=SMALL["rows"])
    expected = (x.double() @ w.double().t()) * scale.double() * w_scale.double()
    # fp8 tensor cores keep 14 bits of a step's sum: fp16's line of the table.
    assert_close(y, expected, torch.float16)


def test_scaled_matmul__packed_weights_unpacked_to_fp8(device):
    m, n, k = 19, 35, 96
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=device)
    x = torch.randn(m, k, device=device).clamp(-4, 4).to(torch.float8_e4m3fn)
    scale, w_scale = torch.rand(1, device=device), torch.rand(n, device=device)
    if scaled_matmul.supports(x, x[:1].expand(n, k), w_scale, None, torch.float32):
        pytest.skip("no fp8 on this device")
    y = torch.full((m, n), float("nan"), device=device)
    linear = scaled_matmul.Linear(pack_int4(codes), w_scale, None, y)
    config = Config(16, 32, 32, 4, 2, variant="unpack")
    rows = scaled_matmul.row_scale(scale, m)
    scaled_matmul.multiply(x, [linear], rows, config=config)
    assert_close(y, (x.double() @ codes.double().t()) * scale.double() * w_scale.double(), torch.float16)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x_q": torch.float32}, "x_q is int8"),
        ({"w_q": torch.float32}, "packed uint8"),
        ({"w_scale": torch.float64}, "w_scale is float32"),
        ({"x_scale": torch.float16}, "a scale is"),
    ],
)
def test_scaled_matmul__names_what_is_wrong(change, why, device):
    x, w, w_scale, _ = operands(4, 16, 32, 8, device)
    given = {"x_q": x, "w_q": w, "x_scale": torch.ones(1, device=device), "w_scale": w_scale}
    given = {name: t.to(change.get(name, t.dtype)) for name, t in given.items()}
    with pytest.raises(ValueError, match=why):
        scaled_matmul.scaled_matmul(*given.values())


def test_scaled_matmul__scale_must_fit_the_rows(device):
    x, w, w_scale, _ = operands(4, 16, 32, 8, device)
    with pytest.raises(ValueError, match="1 or M = 4 entries"):
        scaled_matmul.scaled_matmul(x, w, torch.ones(2, device=device), w_scale)
