"""Products of 17 to 512 rows on Hopper, of weights that are widened in registers: several linears in a launch, all tiles."""

import pytest
import torch
from tolerance import assert_close

from mmqc.kernels.matmul import scaled_matmul as scaled
from mmqc.kernels.matmul import weight_only_matmul as weight_only
from mmqc.kernels.matmul.configs import MatmulConfig, config
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.scaled_matmul_epilogue import scaled_matmul_epilogue
from mmqc.kernels.shared import split_k
from mmqc.kernels.shared.device_facts import has_warpgroup_products
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.kernels.warpgroup import byte_matmul, packed_matmul
from mmqc.ops.pack import pack_int4

HERE = torch.cuda.is_available() and has_warpgroup_products(torch.device("cuda"))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="warpgroup products are Hopper's")]
ROWS = (17, 32, 33, 64, 100, 128, 200, 257, 512)
# columns of each linear, and channels: of one tile, of less than a step, of q, k, v, of many tiles that are cut, of two rounds
SHAPES = [((64,), 32), ((40, 8), 96), ((3584, 512, 512), 3584), ((3584,), 18944), ((18944, 18944), 1792), ((264, 1288), 4160)]
BYTES = {
    "half": MatmulConfig(32, 128, 64, 4, 6, split_k=8, per_sm=2, variant="registers"),
    "one": MatmulConfig(64, 128, 64, 4, 6, per_sm=2, variant="registers"),
    "two warpgroups": MatmulConfig(64, 256, 64, 8, 8, split_k=4, variant="registers"),
    "wide": MatmulConfig(128, 128, 64, 4, 4, split_k=8, per_sm=2, variant="registers"),
}


def nan(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed__several_linears_equal_float64(shape, m, dtype) -> None:
    columns, k = shape
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
    codes = [torch.randint(-8, 8, (n, k), dtype=torch.int8, device="cuda") for n in columns]
    scale, bias = ([torch.rand(n, device="cuda") + 0.1 * i for n in columns] for i in (0, 1))
    x_scale, ys = torch.rand(1, device="cuda") * 0.01, [nan(m, n, dtype) for n in columns]
    linears = [Linear(pack_int4(w), s, b, y) for w, s, b, y in zip(codes, scale, bias, ys, strict=True)]
    products = scaled.plan(x, linears)
    assert {product.kernel for product in products} == {"registers"}
    for _ in range(2):  # counters are zero again
        for launch in scaled.launches(x, linears, row_scale(x_scale, m), products):
            launch.run()
    for w, s, b, y in zip(codes, scale, bias, ys, strict=True):
        assert_close(y, (x.double() @ w.double().t()) * x_scale.double() * s.double() + b.double(), dtype)


def test_packed__in_a_graph_that_inductor_captures() -> None:
    """Sums that outlast a call do not lie in the graph's memory, which Inductor checks behind its warm-up."""
    x = torch.randint(-128, 128, (64, 18944), dtype=torch.int8, device="cuda")
    w, s = pack_int4(torch.randint(-8, 8, (3584, 18944), dtype=torch.int8, device="cuda")), torch.rand(3584, device="cuda")
    x_scale, split_k._sums = torch.ones(1, device="cuda"), {}

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mmqc.scaled_matmul(x, w, x_scale, s, None, None, 4, torch.float32) + 1

    compiled, want = torch.compile(product, mode="reduce-overhead"), product(x)
    assert len(split_k._sums) == 1, "summed up in memory"
    split_k._sums.clear()
    for _ in range(4):
        assert torch.equal(compiled(x).clone(), want)


def test_packed__share_a_launch_up_to_512_rows() -> None:
    x = torch.zeros(513, 64, dtype=torch.int8, device="cuda")
    w, s = torch.zeros(64, 32, dtype=torch.uint8, device="cuda"), torch.ones(64, device="cuda")
    for m, count in ((16, 1), (17, 1), (512, 1), (513, 3)):
        linears = [Linear(w, s, None, nan(m, 64, torch.bfloat16)) for _ in range(3)]
        products = scaled.plan(x[:m], linears)
        assert len(products) == count
        assert products[0].kernel == ("pointers" if m == 16 else "registers")
    odd = [Linear(w[:n], s[:n], None, nan(64, n, torch.bfloat16)) for n in (64, 33)]  # rows of y that TMA cannot write
    assert [p.kernel for p in scaled.plan(x[:64], odd)] == ["registers", "pointers"]


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("m", [24, 64, 130, 400])
def test_packed__epilogue_equals_the_other_kernel(m, activation) -> None:
    x = torch.randint(-128, 128, (m, 704), dtype=torch.int8, device="cuda")
    w, s = pack_int4(torch.randint(-8, 8, (1288, 704), dtype=torch.int8, device="cuda")), torch.rand(1288, device="cuda")
    rows, codes = row_scale(torch.full((1,), 1e-3, device="cuda"), m), row_scale(torch.rand(1, device="cuda") + 0.5, m)
    got, want = (torch.zeros(m, 1288, dtype=torch.int8, device="cuda") for _ in range(2))
    epilogue = Epilogue(activation, torch.bfloat16, codes)
    scaled_matmul_epilogue(x, [Linear(w, s, None, got)], rows, epilogue)
    other = MatmulConfig(64, 128, 64, 4, 4, variant="columns")
    scaled_matmul_epilogue(x, [Linear(w, s, None, want)], rows, epilogue, other)
    assert torch.equal(got, want)
    assert got.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*BYTES, "chosen"])
@pytest.mark.parametrize(("m", "n", "k"), [(17, 8, 16), (64, 1288, 3600), (64, 40000, 128), (100, 264, 4112), (256, 3584, 1024)])
def test_bytes__equal_float64(m, n, k, name, dtype) -> None:
    x, w = torch.randn(m, k, device="cuda").to(dtype), torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
    scale, bias, y = torch.rand(n, device="cuda") * 0.01, torch.randn(n, device="cuda"), nan(m, n, dtype)
    linear, tile = Linear(w, scale, bias, y), BYTES.get(name) or config(byte_matmul.OP, m, n, k, x.device)
    assert byte_matmul.why_not(x, linear, None, 0) is None
    for _ in range(2):
        byte_matmul.launch(x, linear, tile).run()
    assert_close(y, (x.double() @ w.double().t()) * scale.double() + bias.double(), dtype)


def test_bytes__are_chosen_for_a_large_weight_and_beyond_64_rows_for_several() -> None:
    x = torch.randn(300, 4096, device="cuda").bfloat16()

    def kernels(m: int, *columns: int) -> list[str]:
        w = [torch.zeros(n, 4096, dtype=torch.int8, device="cuda") for n in columns]
        linears = [Linear(c, torch.ones(len(c), device="cuda"), None, nan(m, len(c), x.dtype)) for c in w]
        return [product.kernel for product in weight_only.plan(x[:m], linears, 8)]

    assert kernels(16, 8192) == kernels(64, 4096) == kernels(64, 8193) == kernels(64, 8192, 8192) == ["pointers"]
    assert kernels(17, 8192) == kernels(256, 8192) == ["registers"]
    assert kernels(65, 8192, 8192) == ["registers"] * 2
    assert kernels(257, 8192) == ["torch"]


def test_tiles__of_every_shape_leave_room_for_their_slots() -> None:
    device = torch.device("cuda")
    for m in ROWS:
        for n in (64, 4608, 37888, 152064):
            assert packed_matmul.shares(config(packed_matmul.OP, m, n, 3584, device), 4, 128) <= 8
            assert byte_matmul.shares(config(byte_matmul.OP, m, n, 3584, device), 2) <= 8
