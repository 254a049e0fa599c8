"""Activation, gate and the next quantization in the epilogue, next to the plain-torch op: odd sizes, every kernel."""

import os
import subprocess
import sys

import pytest
import torch
from launches import no_work
from row_scales import row_scales
from tolerance import TOLERANCE, assert_close

from mmqc.ops import quantize as quantize_op
from mmqc.ops.pack import pack_int4
from mmqc.ops.scaled_matmul_epilogue import ACTIVATIONS, reference

kernel = pytest.importorskip("mmqc.kernels.matmul.scaled_matmul_epilogue")
scaled = pytest.importorskip("mmqc.kernels.matmul.scaled_matmul")
on_cuda = pytest.importorskip("mmqc.kernels.on_cuda")
tiles = pytest.importorskip("mmqc.kernels.matmul.epilogue_tiles")
Config = pytest.importorskip("mmqc.kernels.matmul.configs").MatmulConfig

TILES = {
    "rows": Config(16, 32, 32, 4, 2, group_m=2),
    "columns": Config(16, 32, 32, 4, 2, group_m=2, variant="columns"),
    "split": Config(16, 32, 32, 4, 2, split_k=3, variant="columns"),
    "nested": Config(32, 32, 32, 4, 2, group_m=2, variant="nested"),
    "unpack": Config(32, 64, 32, 4, 2, variant="unpack"),
}
SHAPES = [(17, 33, 100), (1, 27, 31), (50, 70, 128)]
WAYS = [("one", "rows"), ("one", "nested"), ("visual", "split"), ("visual", "nested"), ("visual", "columns"), ("row", "rows")]


def operands(m, n, k, bits, linears, device, bias=True):
    """x_q, weights, their scales, biases; z is about as large as one."""
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
    top = 2 ** (bits - 1)
    codes = [torch.randint(-top, top, (n, k), dtype=torch.int8, device=device) for _ in range(linears)]
    scales = [(torch.rand(n, device=device) + 0.5) / (20 * top * k**0.5) for _ in codes]
    w = [c if bits == 8 else pack_int4(c) for c in codes]
    return x, w, scales, [torch.randn(n, device=device) if bias else None for _ in codes]


def run(x, w, w_scale, bias, x_scale, activation, tile, dtype=torch.float32, codes=None, bits=8, low=None, **rows):
    """The launch, into y filled with what no result is."""
    m, n = x.shape[0], w[0].shape[0]
    y = torch.full((m, n), float("nan") if codes is None else -77, dtype=dtype if codes is None else torch.int8, device=x.device)
    linears = [scaled.Linear(*parts, y) for parts in zip(w, w_scale, bias, strict=True)]
    epilogue = tiles.Epilogue(activation, dtype, codes, bits, low)
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
    z = [
        (x.double() @ v.double().t() * x_rows.double()[:, None] * s.double() + b.double()).float().to(dtype)
        for v, s, b in zip(w, w_scale, bias, strict=True)
    ]
    h = torch.nn.functional.silu(z[0]) * (z[1] if linears == 2 else 1)
    assert_codes(got, h, rows[:, None])
    assert got.unique().numel() > 30


@pytest.mark.parametrize(("takes", "linears"), [(True, {"scaled_matmuls"}), (False, {"scaled_matmul"})])
def test_decompose__parts_of_a_gate_share_a_launch_where_a_kernel_takes_them(takes, linears, monkeypatch):
    from torch.fx.experimental.proxy_tensor import make_fx

    from mmqc.lowering import scaled_matmul_epilogue as lowering

    monkeypatch.setattr(lowering, "takes_kernel", lambda *_: takes)
    monkeypatch.setattr(lowering, "better_apart", lambda *_: True)
    x, w, scale = torch.randint(-128, 128, (5, 64), dtype=torch.int8), torch.zeros(48, 32, dtype=torch.uint8), torch.ones(48)
    one = torch.ones(1)

    def parts(x):
        return lowering.decompose(x, [w, w], one, [scale, scale], [None, None], None, 4, torch.float32, "silu", one)

    graph = make_fx(parts)(x)
    names = [str(n.target).split(".")[1] for n in graph.graph.nodes if str(n.target).startswith("mmqc.scaled")]
    assert set(names) == linears
    assert len(names) == (1 if takes else 2)
    assert torch.equal(graph(x), reference(x, [w, w], one, [scale, scale], [None, None], None, 4, torch.float32, "silu", one))


def test_better_apart__a_gate_and_weights_that_stay_packed(monkeypatch):
    from mmqc.kernels.warpgroup import packed_matmul, pingpong_matmul
    from mmqc.lowering.scaled_matmul_epilogue import better_apart

    codes, packed = torch.empty(48, 96, dtype=torch.int8), torch.empty(48, 48, dtype=torch.uint8)
    x, few = torch.empty(2, 600, 96, dtype=torch.int8), torch.empty(16, 96, dtype=torch.int8)
    scale, dtype = [torch.empty(48)] * 2, torch.bfloat16
    assert not better_apart(x, [packed, packed], scale, dtype), "no Hopper"
    for module in (kernel, packed_matmul, pingpong_matmul):
        monkeypatch.setattr(module, "has_warpgroup_products", lambda device: True)
    assert better_apart(x, [packed, packed], scale, dtype)
    assert better_apart(x[0, :65], [packed, packed], scale, dtype)
    assert not better_apart(x[0, :64], [packed, packed], scale, dtype), "one launch has both"
    for other in ((x, [packed]), (x, [codes, codes]), (few, [packed, packed]), (x[..., :90], [packed, packed])):
        assert not better_apart(*other, scale[: len(other[1])], dtype)


@pytest.mark.parametrize(("m", "kernel_of_both"), [(513, True), (512, False)])
@pytest.mark.parametrize(("bits", "always", "tile"), [(8, True, "pingpong"), (8, False, "pingpong"), (4, True, "unpack")])
def test_plan__of_many_rows_one_launch_of_both(m, kernel_of_both, bits, always, tile, monkeypatch):
    from mmqc.kernels.matmul.product import Caller
    from mmqc.kernels.warpgroup import pingpong_matmul

    for module in (kernel, pingpong_matmul):
        monkeypatch.setattr(module, "has_warpgroup_products", lambda device: True)
    monkeypatch.setattr(scaled, "tile_of", lambda *_: Config(128, 128, 128, 4, 8, variant=tile))
    x, w = torch.empty(m, 96, dtype=torch.int8), torch.empty(48, 96 * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
    y = torch.empty(m, 48, dtype=torch.int8)
    linears, dtype = [scaled.Linear(w, torch.ones(48), None, y)] * 2, torch.bfloat16
    assert kernel.are_pingpong(x, linears, Caller(always=always)) is kernel_of_both
    if kernel_of_both:
        [product] = kernel.plan(x, linears, dtype, Caller(always=always))
        assert (product.kernel, product.written_out, product.linears) == ("gated pingpong", bits == 4, (0, 1))
        epilogue, one = tiles.Epilogue("silu", dtype, scaled.row_scale(torch.ones(1), m)), torch.ones(1)
        made = list(kernel.launches(x, linears, scaled.row_scale(one, m), epilogue, [product], work=no_work))
        assert len(made) == (1 if bits == 8 else 3)
        assert made[-1].args["y_desc"] is y
    narrow = [linear._replace(y=y[:, :40]) for linear in linears]
    assert kernel.are_pingpong(x, narrow, Caller()) is kernel_of_both
    odd = torch.empty(m, 47, dtype=torch.int8)
    assert not kernel.are_pingpong(x, [linear._replace(y=odd) for linear in linears], Caller()), "not 16 bytes"
    assert not kernel.are_pingpong(x, linears, Caller(gluon=False))
    if bits == 4:
        assert not kernel.are_pingpong(x, linears, Caller(always=False)), "a graph writes out nothing that it may not read"


@pytest.mark.parametrize(
    ("m", "kernels"), [(17, ["gated"]), (64, ["gated"]), (65, ["registers", "pass"]), (600, ["registers"] * 2 + ["pass"])]
)
def test_plan__of_packed_weights_one_launch_of_both_or_a_pass_behind_them(m, kernels, monkeypatch):
    from mmqc.kernels.warpgroup import packed_matmul, pingpong_matmul

    for module in (kernel, packed_matmul, pingpong_matmul):
        monkeypatch.setattr(module, "has_warpgroup_products", lambda device: True)
    x, w, y = torch.empty(m, 96, dtype=torch.int8), torch.empty(48, 48, dtype=torch.uint8), torch.empty(m, 48, dtype=torch.int8)
    linears = [scaled.Linear(w, torch.ones(48), None, y)] * 2
    products = kernel.plan(x, linears, torch.bfloat16)
    assert [product.kernel for product in products] == kernels
    asked = []

    def new(*made):
        asked.append(made)
        return torch.empty(made[0], dtype=made[1])

    epilogue, one = tiles.Epilogue("silu", torch.bfloat16, scaled.row_scale(torch.ones(1), m)), torch.ones(1)
    made = list(kernel.launches(x, linears, scaled.row_scale(one, m), epilogue, products, new=new))
    assert len(made) == len(kernels)
    assert asked == ([] if kernels == ["gated"] else [((m, 48), torch.bfloat16, x.device)] * 2)
    assert made[-1].args["y_desc" if kernels == ["gated"] else "y_ptr"] is y


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("rank", [1, 5])
def test_scaled_matmul_epilogue__a_term_of_low_rank(rank, tile, device):
    m, n, bits = 37, 45, 4 if tile == "unpack" else 8
    x, w, w_scale, bias = operands(m, n, 96, bits, 1, device)
    low_x, low_w = torch.randn(m, rank, device=device), torch.randn(n, rank, device=device)
    one = torch.ones(1, device=device)
    want = reference(x, w, one, w_scale, bias, None, bits, torch.float32, "none", None, None, 8, low_x, low_w)
    assert_close(run(x, w, w_scale, bias, one, "none", tile, low=(low_x, low_w)), want)
    args = (x.view(1, m, 96), w, one, w_scale, bias, None, bits, torch.float32, "gelu", None, None, 8)
    got = on_cuda.scaled_matmul_epilogue(*args, low_x.t().contiguous().t()[None], low_w)  # any strides
    assert_close(got, reference(*args, low_x[None], low_w))


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
    from mmqc.kernels.shared import split_k

    x, w, w_scale, bias = operands(7, 64, 512, 8, 2, device)
    one = torch.ones(1, device=device)
    ys = [run(x, w, w_scale, bias, one, "silu", "split") for _ in range(3)]
    assert torch.equal(ys[0], ys[1])
    assert torch.equal(ys[0], ys[2])
    assert not split_k._counters[x.device, False].any()


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
    for dtype, biases, why in ((torch.float64, bias, "out_dtype is one of"), (torch.float32, [bias[0], None], "a bias")):
        assert why in on_cuda.why_not_epilogue(x, w, w_scale, biases, 8, dtype)
        args = (x, w, one, w_scale, biases, None, 8, dtype, "silu")
        assert_close(on_cuda.scaled_matmul_epilogue(*args), reference(*args))
    wide = [torch.cat((v, v), 1)[:, :32] for v in w]
    assert "equally far" in on_cuda.why_not_epilogue(x, [w[0], wide[0]], w_scale, bias, 8, torch.float32)


OFFLINE = """
import os, re, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mmqc.kernels.matmul import epilogue_tiles, scaled_matmul, scaled_matmul_epilogue as kernel
from mmqc.kernels.matmul.configs import MatmulConfig as Config
from mmqc.kernels.matmul.product import Product, kernel_of
from mmqc.kernels.shared import row_scale
from mmqc.kernels.shared.split_k import workspace

activation, bits, linears, m, n, warps, variant = sys.argv[1], *map(int, sys.argv[2:7]), sys.argv[7]
for module in (scaled_matmul, kernel):
    module.multiprocessors, module.has_inline_ptx = lambda device: 132, lambda device: True
persistent = variant == "nested"
stages = 4 if n == 256 or bits == 4 else 3
c = Config(128, n, 64 if bits == 4 else 128, warps, stages, per_sm=2 if persistent else 1, variant=variant)
stored = torch.empty(4096, 2048, dtype=torch.uint8) if bits == 4 else torch.empty(4096, 4096, dtype=torch.int8)
y, one, pair = torch.empty(m, 4096, dtype=torch.int8), torch.empty(1), torch.empty(2)
rows = row_scale.RowScale(row_scale.VISUAL.value, pair, torch.empty(m, dtype=torch.uint8))
epilogue = epilogue_tiles.Epilogue(activation, torch.bfloat16, rows)
bias = torch.empty(4096, dtype=torch.bfloat16)
given = [scaled_matmul.Linear(stored, torch.empty(4096), bias, y)] * linears
product = Product(*kernel_of(kernel.with_epilogue(c, linears), persistent))
made = kernel.launch(torch.empty(m, 4096, dtype=torch.int8), given, rows, product, epilogue, workspace)
kinds = {torch.int8: "*i8", torch.uint8: "*u8", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32"}
types, wide = {}, {}
for i, name in enumerate(made.kernel.arg_names):
    value = made.args.get(name)
    if name in made.constants:
        types[name] = "constexpr"
    elif name in made.descriptors:
        types[name] = f"tensordesc<i8{list(made.descriptors[name])}>"
    else:
        types[name] = kinds[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        wide[(i,)] = [["tt.divisibility", 16]]
source = ASTSource(made.kernel, types, made.constants, wide)
options = {"num_warps": made.num_warps, "num_stages": made.num_stages}
code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(code.asm["cubin"])
    file.flush()
    tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    print(subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "bits", "linears", "n", "warps", "variant"),
    [
        ("gelu", 8, 1, 128, 4, "nested"),
        ("gelu", 8, 1, 256, 8, "nested"),
        ("silu", 8, 2, 128, 4, "nested"),
        ("gelu", 4, 1, 128, 8, "columns"),
        ("silu", 4, 2, 128, 8, "columns"),
    ],
)
def test_scaled_matmul_epilogue__does_not_spill(activation, bits, linears, n, warps, variant):
    """What does not fit into registers goes to a thread's stack: on Hopper there is none."""
    bare = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", OFFLINE, activation, *map(str, (bits, linears, 2048, n, warps)), variant]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=300)
    assert "STACK:0 " in done.stdout, done.stdout + done.stderr[-2000:]
