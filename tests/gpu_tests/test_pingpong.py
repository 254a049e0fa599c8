"""Warp-specialised products on Hopper against float64 and against the other kernels: all tiles, odd sizes, cut last rounds."""

import pytest
import torch
from row_scales import KINDS, row_scales
from tolerance import assert_close

from mmqc.backend import backend, collect_records
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.mixed_matmul import Weight, mixed_matmul
from mmqc.kernels.matmul.scaled_matmul import scaled_matmul
from mmqc.kernels.matmul.scaled_matmul_epilogue import are_pingpong, scaled_matmul_epilogue
from mmqc.kernels.rows import quantize_per_token
from mmqc.kernels.shared.device_facts import has_warpgroup_products
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.kernels.warpgroup import pingpong_matmul as pingpong
from mmqc.ops.mixed_matmul import reference as mixed_reference
from mmqc.ops.pack import pack_int4

HERE = torch.cuda.is_available() and has_warpgroup_products(torch.device("cuda"))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="warpgroup products are Hopper's")]
TILES = {
    "two": MatmulConfig(128, 128, 128, 4, 8, variant="pingpong"),
    "two, cut": MatmulConfig(128, 128, 128, 4, 8, split_k=4, variant="pingpong"),
    "two of half": MatmulConfig(64, 128, 128, 4, 8, group_m=3, split_k=4, variant="pingpong"),
    "two wide": MatmulConfig(64, 256, 128, 4, 8, split_k=2, variant="pingpong"),
    "one": MatmulConfig(128, 256, 128, 8, 8, split_k=4, variant="pingpong"),
    "one tall": MatmulConfig(256, 128, 128, 8, 2, split_k=4, variant="pingpong"),
}
REGISTERS = {
    "wide": MatmulConfig(128, 128, 64, 4, 4, per_sm=2, variant="registers"),
    "wide, cut": MatmulConfig(128, 128, 64, 4, 4, split_k=4, per_sm=2, variant="registers"),
    "half": MatmulConfig(64, 128, 64, 4, 4, group_m=3, split_k=2, per_sm=2, variant="registers"),
}
CLASSIC = MatmulConfig(128, 128, 128, 4, 3, variant="descriptors", per_sm=2)
# rows, columns, channels: one tile, a cut round alone, rounds and a cut one, rounds and one that is not cut, K of part of a step
SHAPES = [(7, 40, 16), (300, 264, 3600), (1999, 1288, 4112), (2048, 4608, 384), (2048, 2304, 4096), (2111, 1800, 48)]
FP8 = torch.float8_e4m3fn


def operands(m: int, n: int, k: int, kind: torch.dtype = torch.int8, least: int = -128) -> tuple[torch.Tensor, ...]:
    if kind == torch.int8:
        x = torch.randint(-128, 128, (m, k), dtype=kind, device="cuda")
        w = torch.randint(least, -least, (n, k), dtype=kind, device="cuda")
    else:
        x, w = (torch.randn(rows, k, device="cuda").to(kind) for rows in (m, n))
    return x, w, torch.rand(n, device="cuda") + 0.5, torch.randn(n, device="cuda")


def nan(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaled__equals_float64(shape, name, dtype) -> None:
    m, n, k = shape
    x, w, w_scale, bias = operands(m, n, k)
    x_scale = torch.rand(1, device="cuda") * 0.01
    out = nan(m, n, dtype)
    scaled_matmul(x, w, x_scale, w_scale, bias, out_dtype=dtype, out=out, config=TILES[name])
    assert_close(out, (x.double() @ w.double().t()) * x_scale.double() * w_scale.double() + bias.double(), dtype)


@pytest.mark.parametrize("name", TILES)
def test_scaled__fp8_is_reproducible_and_near_the_other_kernel(name) -> None:
    x, w, w_scale, bias = operands(1999, 1288, 4112, FP8)
    x_scale = torch.rand(1, device="cuda")
    given = dict(out_dtype=torch.bfloat16, config=TILES[name])
    y = scaled_matmul(x, w, x_scale, w_scale, bias, out=nan(1999, 1288, torch.bfloat16), **given)
    assert torch.equal(y, scaled_matmul(x, w, x_scale, w_scale, bias, **given))
    want = (x.double() @ w.double().t()) * x_scale.double() * w_scale.double() + bias.double()
    classic = scaled_matmul(x, w, x_scale, w_scale, bias, out_dtype=torch.bfloat16, config=CLASSIC)
    assert float((y.double() - want).norm()) <= 1.1 * float((classic.double() - want).norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["two, cut", "one", "wide, cut"])
def test_scaled__scale_of_every_kind(kind, name) -> None:
    m, n, k = 1000, 520, 544
    x, w, w_scale, bias = operands(m, n, k, least=-8 if name in REGISTERS else -128)
    scale, more, rows = row_scales(kind, m, torch.device("cuda"), 0.0, 0.01)
    out = nan(m, n, torch.float16)
    stored = pack_int4(w) if name in REGISTERS else w
    given = dict(out_dtype=torch.float16, out=out, config=(TILES | REGISTERS)[name], **more)
    scaled_matmul(x, stored, scale, w_scale, bias, **given)
    want = (x.double() @ w.double().t()) * rows.double()[:, None] * w_scale.double() + bias.double()
    assert_close(out, want, torch.float16)


@pytest.mark.parametrize("activation", ["none", "relu", "silu", "quick_gelu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("name", ["two, cut", "one", "wide, cut"])
def test_epilogue__equals_the_other_kernel(activation, codes, name) -> None:
    m, n, k = 900, 1040, 672
    x, w, w_scale, bias = operands(m, n, k, least=-8 if name in REGISTERS else -128)
    w_scale = w_scale / 2e4
    low = (torch.randn(m, 4, device="cuda").bfloat16(), torch.randn(n, 4, device="cuda").bfloat16())
    next_scale, visual = torch.tensor([0.02, 0.03], device="cuda"), torch.rand(m, device="cuda") < 0.5
    after = Epilogue(activation, torch.bfloat16, row_scale(next_scale, m, visual) if codes else None, 8, low)
    rows, found = row_scale(torch.rand(m, device="cuda"), m), []
    stored = pack_int4(w) if name in REGISTERS else w
    for config, weight in (((TILES | REGISTERS)[name], stored), (CLASSIC, w)):
        y = torch.full((m, n), 77, dtype=torch.int8 if codes else torch.bfloat16, device="cuda")
        scaled_matmul_epilogue(x, [Linear(weight, w_scale, bias, y)], rows, after, config)
        found.append(y.float())
    off = (found[0] - found[1]).abs()
    assert float(off.max()) <= (1 if codes else 0.02 * float(found[1].abs().max()))  # a rounding at a tie
    assert float((off > 0).float().mean()) < 1e-3


@pytest.mark.parametrize("name", [None, "two, cut", "two of half", "two wide", "one", "one tall"])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("activation", ["none", "silu", "gelu_tanh"])
def test_gated__equals_the_other_kernel(activation, codes, name) -> None:
    m, n, k = 900, 1040, 672
    x, gate, w_scale, bias = operands(m, n, k)
    up, u_scale = operands(m, n, k)[1:3]
    rows, found = row_scale(torch.rand(m, device="cuda"), m), []
    next_scale, visual = torch.tensor([0.02, 0.03], device="cuda"), torch.rand(m, device="cuda") < 0.5
    after = Epilogue(activation, torch.bfloat16, row_scale(next_scale, m, visual) if codes else None)
    for config in (None if name is None else TILES[name], CLASSIC):
        y = torch.full((m, n), 77, dtype=torch.int8, device="cuda") if codes else nan(m, n, torch.bfloat16)
        linears = [Linear(w, s / 2e4, bias, y) for w, s in ((gate, w_scale), (up, u_scale))]
        assert are_pingpong(x, linears)  # without a tile that is given
        scaled_matmul_epilogue(x, linears, rows, after, config)
        found.append(y.float())
    off = (found[0] - found[1]).abs()
    assert float(off.max()) <= (1 if codes else 0.02 * float(found[1].abs().max()))  # a rounding at a tie
    assert float((off > 0).float().mean()) < 1e-3


@pytest.mark.parametrize(("m", "n", "k"), [(513, 16, 16), (1999, 1296, 4112), (2050, 18944, 384)])
def test_gated__odd_sizes_against_the_linears_and_the_gate_in_float64(m, n, k) -> None:
    x, gate, w_scale, bias = operands(m, n, k)
    up, u_scale, b_up = operands(m, n, k)[1:]
    y, rows = nan(m, n, torch.bfloat16), row_scale(torch.full((1,), 0.5, device="cuda"), m)
    linears = [Linear(w, s / (60 * k), b, y) for w, s, b in ((gate, w_scale, bias), (up, u_scale, b_up))]
    scaled_matmul_epilogue(x, linears, rows, Epilogue("silu", torch.bfloat16))
    g, u = ((0.5 * (x.double() @ v.w.double().t()) * v.scale.double() + v.bias.double()).bfloat16() for v in linears)
    assert_close(y, torch.nn.functional.silu(g) * u, torch.bfloat16)


@pytest.mark.parametrize("codes", [False, True])
def test_gated__of_packed_weights_two_products_and_a_pass_equal_it(codes) -> None:
    m, n, k = 900, 1040, 672
    x, gate, w_scale, _ = operands(m, n, k, least=-8)
    up, u_scale = operands(m, n, k, least=-8)[1:3]
    rows, found = row_scale(torch.rand(m, device="cuda"), m), []
    after = Epilogue("silu", torch.bfloat16, row_scale(torch.tensor([0.02], device="cuda"), m) if codes else None)
    for weights in ([gate, up], [pack_int4(gate), pack_int4(up)]):
        y = torch.full((m, n), 77, dtype=torch.int8 if codes else torch.bfloat16, device="cuda")
        linears = [Linear(w, s / 2e4, None, y) for w, s in zip(weights, (w_scale, u_scale), strict=True)]
        scaled_matmul_epilogue(x, linears, rows, after)
        found.append(y.float())
    off = (found[0] - found[1]).abs()
    assert float(off.max()) <= (1 if codes else 0.02 * float(found[1].abs().max()))  # a rounding at a tie
    assert float((off > 0).float().mean()) < 1e-3


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("k", [48, 1040, 4096])
@pytest.mark.parametrize(("m", "n"), [(300, 264), (1999, 1288), (2048, 2304)])
def test_mixed__one_part_equals_the_op(name, k, m, n) -> None:
    widths, bits = [k], [4]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    codes, scale = torch.randint(-8, 8, (n, k), dtype=torch.int8, device="cuda"), torch.rand(n, 1, device="cuda") + 0.5
    stored, sums = pack_int4(codes), codes.sum(1, keepdim=True, dtype=torch.int32)
    rows, out = quantize_per_token.plan(x, widths, bits).run(), nan(m, n, torch.bfloat16)
    mixed_matmul(rows, Weight(stored, None, scale, sums), out=out, config=TILES[name])
    want = mixed_reference(*rows, [stored], scale, sums, None, widths, bits, torch.float64)
    assert_close(out, want, torch.bfloat16)


@pytest.mark.parametrize("name", ["two", "two, cut", "two of half", "two wide"])
@pytest.mark.parametrize(("low", "high"), [(48, 16), (112, 128), (1040, 144), (3136, 448), (3584, 512)])
@pytest.mark.parametrize(("m", "n"), [(7, 40), (300, 264), (1999, 1288), (2048, 2304), (2048, 4608)])
def test_mixed__two_parts_equal_the_op(name, low, high, m, n) -> None:
    """To half a step of the high part in each part of a tile, and the rounding of y."""
    widths, bits = [low, high], [4, 8]
    x = torch.randn(m, low + high, device="cuda", dtype=torch.bfloat16)
    codes = [
        torch.randint(-(2 ** (b - 1)), 2 ** (b - 1), (n, w), dtype=torch.int8, device="cuda")
        for w, b in zip(widths, bits, strict=True)
    ]
    scale, bias = torch.rand(n, 2, device="cuda") + 0.5, torch.randn(n, device="cuda")
    stored, sums = pack_int4(codes[0]), torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1)
    rows, out = quantize_per_token.plan(x, widths, bits).run(), nan(m, n, torch.bfloat16)
    mixed_matmul(rows, Weight(stored, codes[1], scale, sums), bias, out=out, config=TILES[name])
    want = mixed_reference(*rows, [stored, codes[1]], scale, sums, bias, widths, bits, torch.float64)
    assert_close(out, want, torch.bfloat16)


@pytest.mark.parametrize("name", REGISTERS)
@pytest.mark.parametrize("shape", [(7, 40, 32), (300, 264, 3584), (1999, 1288, 4160), (2048, 4608, 384), (2111, 1800, 3136)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed__equals_float64(shape, name, dtype) -> None:
    m, n, k = shape
    x, _, w_scale, bias = operands(m, n, k)
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, device="cuda")
    x_scale = torch.rand(1, device="cuda") * 0.01
    out = nan(m, n, dtype)
    scaled_matmul(x, pack_int4(codes), x_scale, w_scale, bias, out_dtype=dtype, out=out, config=REGISTERS[name])
    assert_close(out, (x.double() @ codes.double().t()) * x_scale.double() * w_scale.double() + bias.double(), dtype)


@pytest.mark.parametrize("name", REGISTERS)
@pytest.mark.parametrize(("low", "high"), [(32, 16), (224, 128), (1088, 272), (3136, 448), (3584, 512), (4096, 0)])
@pytest.mark.parametrize(("m", "n"), [(7, 40), (300, 264), (1999, 1288), (2048, 4608)])
def test_packed__mixed_equals_the_op(name, low, high, m, n) -> None:
    widths, bits = ([low, high], [4, 8]) if high else ([low], [4])
    x = torch.randn(m, low + high, device="cuda", dtype=torch.bfloat16)
    codes = [
        torch.randint(-(2 ** (b - 1)), 2 ** (b - 1), (n, w), dtype=torch.int8, device="cuda")
        for w, b in zip(widths, bits, strict=True)
    ]
    scale, bias = torch.rand(n, len(bits), device="cuda") + 0.5, torch.randn(n, device="cuda")
    stored, sums = [pack_int4(codes[0]), *codes[1:]], torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1)
    rows, out = quantize_per_token.plan(x, widths, bits).run(), nan(m, n, torch.bfloat16)
    weight = Weight(stored[0], stored[1] if high else None, scale, sums)
    mixed_matmul(rows, weight, bias, out=out, config=REGISTERS[name])
    want = mixed_reference(*rows, stored, scale, sums, bias, widths, bits, torch.float64)
    assert_close(out, want, torch.bfloat16)


def test_cut_rounds__replay_in_a_graph() -> None:
    """The counters of a launch are zero before it and after it."""
    x, w, w_scale, bias = operands(600, 1288, 4096)
    x_scale, out = torch.rand(1, device="cuda") * 0.01, nan(600, 1288, torch.float32)
    given = dict(out_dtype=torch.float32, out=out, config=TILES["two, cut"])
    scaled_matmul(x, w, x_scale, w_scale, bias, **given)
    want, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled_matmul(x, w, x_scale, w_scale, bias, **given)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled__calls_the_op_where_rows_are_known(dynamic) -> None:
    torch._dynamo.reset()
    x, w, w_scale, bias = operands(2048, 1280, 1280)
    scale = torch.full((1,), 0.01, device="cuda")

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mmqc.scaled_matmul(x, w, scale, w_scale, bias, None, 8, torch.bfloat16)

    compiled = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    with collect_records() as records, torch.no_grad():
        y = compiled(x)
    assert torch.equal(y, function(x))
    launches = [name for record in records for name in record.kernels]
    assert any("extern" in name for name in launches) != dynamic, launches


def test_compiled__calls_the_op_for_packed_weights() -> None:
    torch._dynamo.reset()
    x, w, w_scale, bias = operands(2048, 1280, 1280, least=-8)
    scale, stored = torch.full((1,), 0.01, device="cuda"), pack_int4(w)

    def function(x: torch.Tensor, w: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.ops.mmqc.scaled_matmul(x, w, scale, w_scale, bias, None, bits, torch.bfloat16)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with collect_records() as records, torch.no_grad():
        y = compiled(x, stored, 4)
    assert torch.equal(y, function(x, w, 8))
    assert any("extern" in name for record in records for name in record.kernels)


def test_pingpong__says_what_it_cannot_do() -> None:
    x, w, w_scale, bias = operands(300, 1001, 512)
    y = nan(300, 1001, torch.bfloat16)
    assert "multiples of 16 bytes" in str(pingpong.why_not(x, w, y))
    assert "codes of one type" in str(pingpong.why_not(x, w.view(torch.uint8), y))
    scaled_matmul(x, w, torch.ones(1, device="cuda"), w_scale, bias, out=y)  # takes another kernel
    assert_close(y, (x.double() @ w.double().t()) * w_scale.double() + bias.double(), torch.bfloat16)
    wide, one = MatmulConfig(256, 256, 128, 4, 8, variant="pingpong"), torch.ones(1, device="cuda")
    with pytest.raises(ValueError, match="leaves no shared memory"):
        scaled_matmul(x, w[:1000], one, w_scale[:1000], out_dtype=torch.float32, config=wide)
    rows = quantize_per_token.plan(torch.randn(300, 512, device="cuda").bfloat16(), [448, 64], [4, 8]).run()
    two = Weight(
        pack_int4(w[:1000, :448].clamp(-8, 7)),
        w[:1000, 448:].contiguous(),
        torch.ones(1000, 2, device="cuda"),
        torch.zeros(1000, 2, dtype=torch.int32, device="cuda"),
    )
    with pytest.raises(ValueError, match="take turns"):
        mixed_matmul(rows, two, config=TILES["one"])
    with pytest.raises(ValueError, match="weights in one part"):
        mixed_matmul(rows, two._replace(low=w[:1000, :448].contiguous()), config=TILES["two"])
