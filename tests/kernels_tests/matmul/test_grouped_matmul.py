"""The Triton kernel of grouped_matmul against the plain-torch op: every distribution of rows, outputs filled with NaN before."""

import pytest
import torch
from shared_memory import HOPPER, shared_memory
from tolerance import assert_close

from mmqc.ops.grouped_matmul import reference
from mmqc.ops.pack import pack

kernel = pytest.importorskip("mmqc.kernels.matmul.grouped_matmul")
on_cuda = pytest.importorskip("mmqc.kernels.on_cuda")
Config = pytest.importorskip("mmqc.kernels.matmul.configs").MatmulConfig

SMALL = Config(16, 32, 32, 4, 2, variant="columns")
ROWS = 40
COUNTS = {
    "uneven": [17, 0, 1, 22],
    "first": [40, 0, 0, 0],
    "last": [0, 0, 0, 40],
    "nothing": [0, 0, 0, 0],
    "none_for_some_rows": [3, 16, 0, 2],
    "whole_tiles": [16, 16, 8, 0],
}


def stacked(n, k, bits, group, device):
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (4, n, k), dtype=torch.int8, device=device)
    scale = torch.rand((4, n, -(-k // group)) if group else (4, n), device=device) * 0.1 + 0.01
    return codes if bits == 8 else pack(codes, bits), scale, torch.randn(4, n, device=device)


def offsets(counts, device):
    return torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)


def filled(n, dtype, device):
    return torch.full((ROWS, n), float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize(("n", "k", "bits", "group"), [(33, 101, 4, 0), (33, 128, 4, 32), (7, 96, 8, 48), (33, 70, 8, 0)])
def test_grouped_matmul__of_floating_point_rows(counts, n, k, bits, group, device):
    w, scale, bias = stacked(n, k, bits, group, device)
    x, o = torch.randn(ROWS, k, device=device).half(), offsets(counts, device)
    y = kernel.grouped_matmul(x, w, scale, o, bias, bits=bits, group_size=group, out=filled(n, x.dtype, device), config=SMALL)
    wanted = reference(x.double(), w, scale, o, bias.double(), None, bits, group, torch.float64)
    assert_close(y, wanted, torch.float16)


def zeros(scale, bits, between=False):
    top = 2 ** (bits - 1)
    zero = torch.randint(-top, top, scale.shape, dtype=torch.int8, device=scale.device)
    return (zero + torch.rand(scale.shape, device=scale.device)).half() if between else zero


@pytest.mark.parametrize("counts", ["uneven", "nothing", "none_for_some_rows"])
@pytest.mark.parametrize(
    ("n", "k", "bits", "group"),
    [(33, 101, 4, 0), (33, 128, 4, 32), (17, 101, 4, 48), (7, 96, 8, 48), (33, 70, 8, 0), (19, 101, 2, 32), (19, 128, 3, 32)],
)
@pytest.mark.parametrize("between", [False, True])
def test_grouped_matmul__with_zero_points(between, counts, n, k, bits, group, device):
    w, scale, bias = stacked(n, k, bits, group, device)
    zero = zeros(scale, bits, between)
    x, o = torch.randn(ROWS, k, device=device).half(), offsets(COUNTS[counts], device)
    y = kernel.grouped_matmul(
        x, w, scale, o, bias, bits=bits, group_size=group, zero=zero, out=filled(n, x.dtype, device), config=SMALL
    )
    wanted = reference(x.double(), w, scale, o, bias.double(), None, bits, group, torch.float64, zero)
    assert_close(y, wanted, torch.float16)


@pytest.mark.parametrize("bits", [2, 3])
def test_grouped_matmul__of_few_bits(bits, device):
    w, scale, bias = stacked(19, 101, bits, 32, device)
    x, o = torch.randn(ROWS, 101, device=device), offsets(COUNTS["uneven"], device)
    y = kernel.grouped_matmul(x, w, scale, o, bias, bits=bits, group_size=32, out=filled(19, x.dtype, device), config=SMALL)
    assert_close(y, reference(x.double(), w, scale, o, bias.double(), None, bits, 32, torch.float64), torch.float32)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), [(33, 101), (16, 64)])
def test_grouped_matmul__of_integer_rows(counts, bits, n, k, device):
    w, scale, bias = stacked(n, k, bits, 0, device)
    x, o = torch.randint(-128, 128, (ROWS, k), dtype=torch.int8, device=device), offsets(counts, device)
    row_scale = torch.rand(ROWS, device=device)
    out = filled(n, torch.float32, device)
    y = kernel.grouped_matmul(x, w, scale, o, bias, row_scale, bits=bits, out=out, out_dtype=torch.float32, config=SMALL)
    assert_close(y, reference(x, w, scale, o, bias, row_scale, bits, 0, torch.float32))


@pytest.mark.parametrize("counts", ["uneven", "none_for_some_rows"])
@pytest.mark.parametrize(("n", "k", "bits", "group"), [(33, 128, 4, 32), (16, 101, 4, 48), (7, 96, 8, 32), (33, 70, 8, 20)])
def test_grouped_matmul__of_integer_rows_in_groups(counts, n, k, bits, group, device):
    w, scale, bias = stacked(n, k, bits, group, device)
    x, o = torch.randint(-128, 128, (ROWS, k), dtype=torch.int8, device=device), offsets(COUNTS[counts], device)
    row_scale = torch.rand(ROWS, device=device)
    y = kernel.grouped_matmul(
        x,
        w,
        scale,
        o,
        bias,
        row_scale,
        bits=bits,
        group_size=group,
        out=filled(n, torch.float32, device),
        out_dtype=torch.float32,
        config=SMALL,
    )
    assert_close(y, reference(x, w, scale, o, bias, row_scale, bits, group, torch.float64), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 300, 3000])
def test_grouped_matmul__integer_rows_in_groups_on_the_gpu(rows, device):
    w, scale, bias = stacked(200, 512, 4, 128, device)
    x, row_scale = (torch.randint(-128, 128, (rows, 512), dtype=torch.int8, device=device), torch.rand(rows, device=device))
    o = torch.tensor([0, rows // 3, rows // 3, rows - 1, rows], device=device)
    y = kernel.grouped_matmul(x, w, scale, o, bias, row_scale, bits=4, group_size=128, out_dtype=torch.float32)
    assert_close(y, reference(x, w, scale, o, bias, row_scale, 4, 128, torch.float64), torch.float32)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_grouped_matmul__behind_the_op(rows, integer, device):
    """The config of the table, rows of any strides, offsets of 64 bits."""
    w, scale, _ = stacked(24, 64, 4, 0, device)
    x = torch.randn(64, rows, device=device).half().T
    o = torch.tensor([0, 0, rows // 2, rows, rows], device=device)
    row_scale = torch.rand(rows, device=device) if integer else None
    x = (x * 40).to(torch.int8) if integer else x
    y = on_cuda.grouped_matmul(x, w, scale, o, None, row_scale, 4, 0, torch.float16)
    wide = torch.float32 if integer else torch.float64
    assert_close(y, reference(x if integer else x.double(), w, scale, o, None, row_scale, 4, 0, wide), torch.float16)


def test_grouped_matmul__float64_goes_to_the_reference(device):
    w, scale, _ = stacked(5, 16, 8, 0, device)
    x, o = torch.randn(9, 16, dtype=torch.float64, device=device), offsets([3, 0, 5, 1], device)
    args = (x, w, scale, o, None, None, 8, 0, torch.float64)
    assert "x is int8 or one of" in on_cuda.why_not_grouped(*args)
    assert torch.equal(on_cuda.grouped_matmul(*args), reference(*args))


@pytest.mark.parametrize("rows", [1, 200])
def test_grouped_matmul__with_zero_points_behind_the_op(rows, device):
    w, scale, _ = stacked(24, 64, 4, 32, device)
    x, zero = torch.randn(rows, 64, device=device).half(), zeros(scale, 4)
    o = torch.tensor([0, 0, rows // 2, rows, rows], device=device)
    y = on_cuda.grouped_matmul(x, w, scale, o, None, None, 4, 32, torch.float16, zero)
    wanted = reference(x.double(), w, scale, o, None, None, 4, 32, torch.float64, zero)
    assert_close(y, wanted, torch.float16)
    assert not torch.equal(y, on_cuda.grouped_matmul(x, w, scale, o, None, None, 4, 32, torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [8, 300, 3000])
@pytest.mark.parametrize("between", [False, True])
def test_grouped_matmul__bfloat16_with_zero_points(between, rows, bits, device):
    w, scale, _ = stacked(200, 512, bits, 128, device)
    x, zero = torch.randn(rows, 512, device=device).bfloat16(), zeros(scale, bits, between)
    o = torch.tensor([0, rows // 3, rows // 3, rows - 1, rows], device=device)
    y = kernel.grouped_matmul(x, w, scale, o, bits=bits, group_size=128, zero=zero)
    assert_close(y, reference(x.double(), w, scale, o, None, None, bits, 128, torch.float64, zero), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "group"), [(2, 48), (3, 48), (4, 0), (4, 48), (4, 128), (8, 0)])
@pytest.mark.parametrize("rows", [8, 300, 3000])
def test_grouped_matmul__bfloat16(rows, bits, group, device):
    w, scale, _ = stacked(200, 512, bits, group, device)
    x = torch.randn(rows, 512, device=device).bfloat16()
    bounds = torch.sort(torch.randint(0, rows, (3,), device=device)).values.to(torch.int32)
    o = torch.cat([bounds.new_zeros(1), bounds, bounds.new_full((1,), rows)])
    y = kernel.grouped_matmul(x, w, scale, o, bits=bits, group_size=group)
    assert_close(y, reference(x.double(), w, scale, o, None, None, bits, group, torch.float64), torch.bfloat16)


SHARED = """
from mmqc.kernels.matmul import grouped_matmul as module
from mmqc.ops.pack import packed_width

class Compiled:
    def __getitem__(self, grid):
        return lambda *args, **options: print(kernel.warmup(*args, grid=grid, **options).metadata.shared)

bits, rows = map(int, sys.argv[1:])
kernel, module.grouped_matmul_kernel = module.grouped_matmul_kernel, Compiled()
module.has_inline_ptx, module.supports = lambda device: True, lambda *args: None
w = torch.empty(8, 200, packed_width(1024, bits), dtype=torch.uint8)
scale, offsets = torch.empty(8, 200, -(-1024 // 48)), torch.zeros(8, dtype=torch.int32)
module.grouped_matmul(torch.empty(rows, 1024).bfloat16(), w, scale, offsets, bits=bits, group_size=48)
"""


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("rows", [512, 8192])
def test_launch__steps_that_cross_groups_fit_shared_memory(rows, bits):
    """With the stages and the width of other steps, all but one of these tiles ask an H100 for 245,760 to 491,520 bytes."""
    assert shared_memory(SHARED, bits, rows) <= HOPPER
