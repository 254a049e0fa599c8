import pytest
import torch
from tolerance import assert_close

import mmqc.ops  # noqa: F401
from mmqc.ops.pack import pack_int4

scaled_matmul = torch.ops.mmqc.scaled_matmul


def operands(
    m: int, n: int, k: int, bits: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    top = 2 ** (bits - 1)
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=g)
    codes = torch.randint(-top, top, (n, k), dtype=torch.int8, generator=g)
    return x, codes, torch.rand(n, generator=g) * 0.1, torch.randn(n, generator=g)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 17, 63), (17, 63, 257), (63, 100, 1), (100, 1, 17), (257, 257, 100)])
def test_scaled_matmul__is_the_dequantized_product(bits: int, m: int, n: int, k: int) -> None:
    x, codes, w_scale, bias = operands(m, n, k, bits)
    stored = pack_int4(codes) if bits == 4 else codes
    x_scale = torch.tensor([0.03])
    y = scaled_matmul(x, stored, x_scale, w_scale, bias, None, bits, torch.float64)
    expected = (x.double() * x_scale.double()) @ (codes.double() * w_scale.double()[:, None]).T + bias.double()
    assert_close(y, expected)
    assert_close(scaled_matmul(x, stored, x_scale, w_scale, bias, None, bits, torch.float32), expected)


def test_scaled_matmul__row_scales_by_modality() -> None:
    x, w, w_scale, _ = operands(10, 8, 32, 8)
    visual = torch.rand(2, 5) > 0.5
    y = scaled_matmul(x.view(2, 5, 32), w, torch.tensor([0.01, 0.2]), w_scale, None, visual, 8, torch.float32)
    for where, scale in ((visual, 0.2), (~visual, 0.01)):
        alone = scaled_matmul(x.view(2, 5, 32)[where], w, torch.tensor([scale]), w_scale, None, None, 8, torch.float32)
        assert torch.equal(y[where], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_matmul__low_precision_output_is_rounded_once(dtype: torch.dtype) -> None:
    x, w, w_scale, bias = operands(7, 9, 64, 8)
    args = (x, w, torch.tensor([0.001]), w_scale, bias, None, 8)
    assert torch.equal(scaled_matmul(*args, dtype), scaled_matmul(*args, torch.float32).to(dtype))


def test_scaled_matmul__refuses() -> None:
    x, w, w_scale, _ = operands(2, 3, 8, 8)
    with pytest.raises(ValueError, match="one entry per output"):
        scaled_matmul(x, w, torch.ones(1), w_scale[:2], None, None, 8, torch.float32)
    with pytest.raises(ValueError, match="x_q is int8"):
        scaled_matmul(x.int(), w, torch.ones(1), w_scale, None, None, 8, torch.float32)
    with pytest.raises(ValueError, match="4-bit weight"):
        scaled_matmul(x, w, torch.ones(1), w_scale, None, None, 4, torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_scaled_matmul__opcheck(bits: int) -> None:
    x, codes, w_scale, bias = operands(6, 5, 17, bits)
    stored = pack_int4(codes) if bits == 4 else codes
    args = (x.view(2, 3, 17), stored)
    torch.library.opcheck(scaled_matmul.default, (*args, torch.ones(1), w_scale, bias, None, bits, torch.float32))
    visual = torch.rand(2, 3) > 0.5
    torch.library.opcheck(scaled_matmul.default, (*args, torch.ones(2), w_scale, None, visual, bits, torch.bfloat16))
