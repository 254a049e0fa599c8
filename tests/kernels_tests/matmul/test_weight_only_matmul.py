"""The Triton kernel of weight_only_matmul against the plain-torch op: 2, 3, 4 and 8 bits, groups that fit and that do not."""

import pytest
import torch
from shared_memory import HOPPER, shared_memory
from tolerance import assert_close

from mmqc.ops.pack import pack
from mmqc.ops.weight_only_matmul import reference

kernel = pytest.importorskip("mmqc.kernels.matmul.weight_only_matmul")
Config = pytest.importorskip("mmqc.kernels.matmul.configs").MatmulConfig

SMALL = {
    "whole": Config(16, 32, 32, 4, 2, group_m=2, variant="columns"),
    "split": Config(16, 16, 64, 4, 2, split_k=3, variant="columns"),
    "unpack": Config(16, 16, 32, 4, 2, variant="unpack"),
}
SHAPES = [
    (1, 33, 256, 32),
    (5, 40, 256, 64),
    (17, 27, 192, 64),
    (3, 19, 101, 32),
    (2, 8, 4304 // 16, 0),
    (4, 1, 1, 0),
    (33, 20, 96, 48),
]


def weights(n, k, bits, group, device, dtype=torch.float32):
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8, device=device)
    scale = torch.rand((n, -(-k // group)) if group else (n,), device=device) * 0.1 + 0.01
    return codes, codes if bits == 8 else pack(codes, bits), scale.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("variant", SMALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_weight_only_matmul__equals_the_op(shape, variant, bits, dtype, device):
    m, n, k, group = shape
    _, w, scale = weights(n, k, bits, group, device)
    x, bias = torch.randn(m, k, device=device).to(dtype), torch.randn(n, device=device)
    out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
    y = kernel.weight_only_matmul(x, w, scale, bias, group_size=group, out=out, config=SMALL[variant], bits=bits)
    assert y is out
    # The op in float64: the kernel may round less often than the op does in x's dtype.
    assert_close(y, reference(x.double(), w, scale, bias.double(), bits, group), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 16, 100])
def test_weight_only_matmul__bfloat16(m, bits, device):
    _, w, scale = weights(200, 1024, bits, 128, device)
    x = torch.randn(m, 1024, device=device).bfloat16()
    y = kernel.weight_only_matmul(x, w, scale, group_size=128, bits=bits)
    assert_close(y, reference(x.double(), w, scale, None, bits, 128), torch.bfloat16)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [0, 32, 48])
@pytest.mark.parametrize("variant", SMALL)
@pytest.mark.parametrize("between", [False, True])
def test_weight_only_matmul__asymmetric(between, variant, group, bits, device):
    m, n, k = 3, 37, 192
    codes, w, scale = weights(n, k, bits, group, device)
    zero = zeros(scale, between)
    x, out = torch.randn(m, k, device=device).half(), torch.full((m, n), float("nan"), dtype=torch.float16, device=device)
    y = kernel.weight_only_matmul(x, w, scale, group_size=group, zero=zero, out=out, config=SMALL[variant], bits=bits)
    wide = [t.double().repeat_interleave(group, 1) if group else t.double()[:, None] for t in (scale, zero)]
    assert_close(y, x.double() @ ((codes.double() - wide[1]) * wide[0]).t(), torch.float16)


def zeros(scale, between):
    """Zero points, on the codes or between and outside of them."""
    zero = torch.randint(-8, 8, scale.shape, dtype=torch.int8, device=scale.device)
    return (zero * 1.5 + torch.rand(scale.shape, device=scale.device)).half() if between else zero


@pytest.mark.parametrize(("k", "group"), [(63, 0), (101, 32)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weight_only_matmul__zero_between_the_codes_and_odd_sizes(bits, k, group, device):
    m, n = 17, 19
    _, w, scale = weights(n, k, bits, group, device)
    zero, x = zeros(scale, True), torch.randn(m, k, device=device)
    out = torch.full((m, n), float("nan"), device=device)
    kernel.weight_only_matmul(x, w, scale, group_size=group, zero=zero, out=out, config=SMALL["whole"], bits=bits)
    assert_close(out, reference(x.double(), w, scale, None, bits, group, zero), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [0, 32, 48, 128])
@pytest.mark.parametrize("m", [1, 16, 100, 3000])
def test_weight_only_matmul__bfloat16_with_zero_between_the_codes(m, group, bits, device):
    _, w, scale = weights(200, 1024, bits, group, device)
    # Of a row whose sum is near nothing the zero points' part cancels, and what is left is the rounding of the whole.
    x, zero = (torch.randn(m, 1024, device=device) + 0.125).bfloat16(), zeros(scale, True)
    y = kernel.weight_only_matmul(x, w, scale, group_size=group, zero=zero, bits=bits)
    assert_close(y, reference(x.double(), w, scale, None, bits, group, zero), torch.bfloat16)


@pytest.mark.parametrize(("group", "dtype", "stages"), [(0, torch.float32, 4), (48, torch.float32, 2), (48, torch.half, 4)])
def test_launch__steps_that_cross_groups_have_a_shallow_pipeline(group, dtype, stages):
    _, w, scale = weights(200, 1024, 2, group, "cpu", dtype)
    x, deep = torch.randn(16, 1024).bfloat16(), Config(16, 64, 128, 2, 4, variant="columns")
    linear = kernel.Linear(w, scale, None, torch.empty(16, 200).bfloat16())
    assert kernel.launch(x, [linear], None, group, 2, deep).num_stages == stages


SHARED = """
from mmqc.kernels.matmul import weight_only_matmul as kernel
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.ops.pack import packed_width

bits, *tile = map(int, sys.argv[1:])
kernel.early_lines, kernel.has_inline_ptx = lambda device, rows: 0, lambda device: True
w = torch.empty(200, packed_width(1024, bits), dtype=torch.uint8)
scale = torch.empty(200, -(-1024 // 48))
linear = kernel.Linear(w, scale, None, torch.empty(16, 200).bfloat16())
tile = MatmulConfig(*tile, variant="columns")
print(kernel.launch(torch.empty(16, 1024).bfloat16(), [linear], scale.half(), 48, bits, tile).compile().metadata.shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "tile"), [(2, (16, 64, 128, 2, 4)), (3, (64, 64, 128, 4, 3)), (4, (128, 128, 64, 8, 3))])
def test_launch__steps_that_cross_groups_fit_shared_memory(bits, tile):
    """With all their stages these tiles ask an H100 for 241,664 bytes and more, of 232,448."""
    assert shared_memory(SHARED, bits, *tile) <= HOPPER


@pytest.mark.parametrize("shape", [(1, 100, 512), (40, 70, 256)])
def test_weight_only_matmul__config_of_the_table(shape, device):
    m, n, k = shape
    _, w, scale = weights(n, k, 4, 128, device, torch.float16)
    x = torch.randn(m, k, device=device).half()
    y = kernel.weight_only_matmul(x, w, scale, group_size=128)
    assert_close(y, reference(x.double(), w, scale, None, 4, 128), torch.float16)


def test_weight_only_matmul__names_what_is_wrong(device):
    _, w, scale = weights(8, 64, 4, 32, device)
    x = torch.randn(2, 64, device=device).half()
    with pytest.raises(ValueError, match=r"w_scale for group_size 64 is \[8, 1\]"):
        kernel.weight_only_matmul(x, w, scale, group_size=64)
    with pytest.raises(ValueError, match="columns for inputs of width 62"):
        kernel.weight_only_matmul(x[:, :62], w, scale, group_size=32)
    with pytest.raises(ValueError, match="zero is contiguous int8 or float16"):
        kernel.weight_only_matmul(x, w, scale, group_size=32, zero=scale)
    with pytest.raises(ValueError, match="x is one of"):
        kernel.weight_only_matmul(x.double(), w, scale, group_size=32)
