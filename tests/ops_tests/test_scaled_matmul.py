import pytest
import simulated
import torch
from tolerance import assert_close

import mmqc.ops  # noqa: F401
from mmqc.ops.pack import pack_int4

scaled_matmul = torch.ops.mmqc.scaled_matmul


def operands(m: int, n: int, k: int, bits: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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


def group_scales(n: int, k: int, group: int, integer: bool, amplifier: int = 1024) -> dict[str, torch.Tensor]:
    """The weight's scales as the op takes them, and the floats [N, K] that they stand for."""
    t = torch.randint(-90, 100, (n, -(-k // group)), dtype=torch.int32)
    wide = (t.double() / amplifier).repeat_interleave(group, 1)[:, :k]
    if integer:
        return {"w_scale": torch.full((n,), 1 / amplifier), "group_scale": t, "wide": wide}
    return {"w_scale": t / amplifier, "group_scale": None, "wide": wide}  # type: ignore[dict-item]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize(("m", "n", "k", "group"), [(1, 17, 64, 32), (17, 9, 257, 64), (5, 8, 96, 96), (3, 1, 7, 16)])
def test_scaled_matmul__group_scales(bits: int, integer: bool, m: int, n: int, k: int, group: int) -> None:
    x, codes, _, bias = operands(m, n, k, bits)
    stored, scales = pack_int4(codes) if bits == 4 else codes, group_scales(n, k, group, integer)
    visual, x_scale = torch.rand(m) > 0.5, torch.tensor([0.01, 0.2])
    last = (scales["group_scale"], group)
    args = (x, stored, x_scale, scales["w_scale"], bias, visual, bits)
    rows = torch.where(visual, 0.2, 0.01)[:, None].float().double()
    expected = rows * (x.double() @ (codes.double() * scales["wide"]).T) + bias.double()
    for dtype in (torch.float64, torch.float32):
        assert_close(scaled_matmul(*args, dtype, *last), expected)
        assert torch.equal(scaled_matmul(*args, dtype, *last), simulated.scaled_matmul(*args, dtype, *last))
    torch.library.opcheck(scaled_matmul.default, (*args, torch.float32, *last))


@pytest.mark.parametrize(("m", "n", "k", "group"), [(17, 9, 257, 64), (3, 1, 7, 16)])
def test_scaled_matmul__small_integer_scales_are_one_product(m: int, n: int, k: int, group: int) -> None:
    x, codes, w_scale, bias = operands(m, n, k, 4)
    t = torch.randint(-15, 16, (n, -(-k // group)), dtype=torch.int8)
    args = (x, pack_int4(codes), torch.tensor([0.01]), w_scale, bias, None, 4)
    times = (codes * t.repeat_interleave(group, 1)[:, :k]).to(torch.int8)
    one = scaled_matmul(args[0], times, *args[2:6], 8, torch.float32)
    for scales in (t, t.int()):
        y = scaled_matmul(*args, torch.float32, scales, group)
        assert torch.equal(y, one)
        assert torch.equal(y, simulated.scaled_matmul(*args, torch.float32, scales, group))
    torch.library.opcheck(scaled_matmul.default, (*args, torch.float32, t, group))


def test_scaled_matmul__integer_scales_convert_once() -> None:
    """An int32 sum is exact where a float32 sum over the groups is not."""
    x, codes, _, _ = operands(6, 5, 512, 4)
    t = torch.randint(1000, 4000, (5, 16), dtype=torch.int32)
    y = scaled_matmul(x, pack_int4(codes), torch.ones(1), torch.ones(5), None, None, 4, torch.float32, t, 32)
    exact = x.double() @ (codes.double() * t.double().repeat_interleave(32, 1)).T
    assert torch.equal(y, exact.float())
    floats = scaled_matmul(x, pack_int4(codes), torch.ones(1), t.float(), None, None, 4, torch.float32, None, 32)
    assert_close(floats, exact)
    assert not torch.equal(floats, exact.float())


def test_scaled_matmul__refuses_group_scales_that_do_not_fit() -> None:
    x, w, w_scale, _ = operands(2, 3, 8, 8)
    t, last = torch.ones(3, 2, dtype=torch.int32), (None, None, 8, torch.float32)
    for scale, group_scale, group, why in (
        (w_scale, t, 0, "group_size = 0"),
        (w_scale, t, 8, r"group_scale is int32 or int8 \[3, 1\]"),
        (w_scale, t.float(), 4, "group_scale is int32"),
        (t.float(), t, 4, "one entry per output"),
        (w_scale, None, 4, r"w_scale for group_size 4 has shape \[3, 2\]"),
    ):
        with pytest.raises(ValueError, match=why):
            scaled_matmul(x, w, torch.ones(1), scale, *last, group_scale, group)


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


FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 17, 63), (63, 100, 1), (33, 57, 300)])
def test_scaled_matmul__float8_is_the_dequantized_product(bits: int, m: int, n: int, k: int) -> None:
    _, codes, w_scale, bias = operands(m, n, k, bits)
    x = (torch.randn(m, k) * 100).clamp(-448, 448).to(FLOAT8)
    w = pack_int4(codes) if bits == 4 else (torch.randn(n, k) * 100).clamp(-448, 448).to(FLOAT8)
    wide = (codes if bits == 4 else w).double()
    args = (x, w, torch.tensor([0.03]), w_scale, bias, None, bits)
    expected = (x.double() * torch.tensor(0.03).double()) @ (wide * w_scale.double()[:, None]).T + bias.double()
    assert_close(scaled_matmul(*args, torch.float64), expected)
    assert_close(scaled_matmul(*args, torch.float32), expected)
    assert torch.equal(simulated.scaled_matmul(*args, torch.float32), scaled_matmul(*args, torch.float32))


def test_scaled_matmul__float8_refuses_what_it_has_no_kernel_for() -> None:
    x, w, s = torch.ones(2, 8).to(FLOAT8), torch.ones(3, 8, dtype=torch.int8), torch.ones(1)
    with pytest.raises(ValueError, match=r"w_q of 8 bits is .*float8_e4m3fn like x_q"):
        scaled_matmul(x, w, s, torch.ones(3), None, None, 8, torch.float32)
    with pytest.raises(ValueError, match="float8 activations take weights without groups"):
        scaled_matmul(x, pack_int4(w), s, torch.ones(3, 2), None, None, 4, torch.float32, None, 4)
    with pytest.raises(ValueError, match="x_q is int8 or"):
        scaled_matmul(x.float(), w, s, torch.ones(3), None, None, 8, torch.float32)
