"""kv_pack against codes counted out one by one."""

import pytest
import torch
from torch import Tensor

import mmqc.ops  # noqa: F401
from mmqc.ops.kv_words import BITS, pack_words, unpack_words

ops = torch.ops.mmqc
COUNTS = torch.tensor([13, 0, 5], dtype=torch.int32)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 20, 8, dtype=dtype) + torch.linspace(-3, 3, 8, dtype=dtype)
    order = torch.stack([torch.randperm(20)[:13] for _ in range(3)])
    return x, order, COUNTS


def one_by_one(x: Tensor, low: float, high: float, bits: int, shrink: float) -> tuple[list[int], float, float]:
    """Codes, scale and offset of some numbers that share a range, by Python's own arithmetic."""
    if low == high:
        return [0] * len(x), 1.0, low
    centre, half = (low + high) / 2, (high - low) / 2 * shrink
    scale = 2 * half / (2**bits - 1)
    codes = [round(min(max((v - (centre - half)) / scale, 0), 2**bits - 1)) for v in x.tolist()]
    return codes, scale, centre - half


def test_words__round_trip_and_layout() -> None:
    for bits in BITS:
        per_byte = 8 // bits
        codes = torch.randint(0, 2**bits, (2, 3, 37, 8))
        keys, values = (pack_words(codes, bits, transposed) for transposed in (False, True))
        assert keys.dtype == values.dtype == torch.int16
        assert keys.shape == (2, 3, 3 * bits, 8)
        assert values.shape == (2, 3, 8, 3 * bits)
        for words, transposed in ((keys, False), (values, True)):
            assert torch.equal(unpack_words(words, bits, transposed)[:, :, :37].long(), codes)
            assert not unpack_words(words, bits, transposed)[:, :, 37:].any()
        of_keys = keys.view(torch.uint8).reshape(2, 3, 6 * bits, 8).int() ^ 128
        of_values = values.view(torch.uint8).reshape(2, 3, bits, 48).int() ^ 128
        one, two = of_keys[1, 2, 1, 5].item(), of_values[1, 2, bits - 1, 36].item()
        assert [(one >> bits * t) % 2**bits for t in range(per_byte)] == codes[1, 2, per_byte : 2 * per_byte, 5].tolist()
        assert [(two >> bits * v) % 2**bits for v in range(per_byte)] == codes[1, 2, 36, 8 - per_byte :].tolist()


@pytest.mark.parametrize("shrink", [1.0, 0.3])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("by", ["channel", "token", "tensor"])
def test_kv_pack__codes_of_an_independent_reference(by: str, bits: int, shrink: float) -> None:
    x, order, count = operands(torch.float64)
    words, scale, offset = ops.kv_pack(x, order, count, bits, by, shrink, False)
    codes = unpack_words(words, bits)
    for b, n in enumerate(count.tolist()):
        some = x[b][:, order[b, :n]]
        assert not codes[b, :, n:].any(), "tokens that do not exist are the code 0"
        for h in range(2):
            lines = [(slice(0, n), c) for c in range(8)] if by != "token" else [(j, slice(0, 8)) for j in range(n)]
            for line in lines if n else []:
                source = some if by == "tensor" else some[h][line]
                want, s, a = one_by_one(some[h][line], source.min().item(), source.max().item(), bits, shrink)
                assert codes[b, h][line].tolist() == want
                at = (b, h, line[0], 0) if by == "token" else (b, h, 0, line[1])
                assert abs(scale[at].item() - s) < 1e-12
                assert abs(offset[at].item() - a) < 1e-12


def test_kv_pack__what_is_not_chosen_does_not_count() -> None:
    x, order, count = operands()
    spoiled = x.clone()
    for b, n in enumerate(count.tolist()):
        rest = [i for i in range(20) if i not in order[b, :n].tolist()]
        spoiled[b, :, rest] = 1e4
    for by in ("channel", "tensor"):
        for got, want in zip(
            ops.kv_pack(spoiled, order, count, 2, by, 1.0, True), ops.kv_pack(x, order, count, 2, by, 1.0, True), strict=True
        ):
            assert torch.equal(got, want)


def test_kv_pack__transposed_and_constant_channels() -> None:
    x, order, count = operands()
    x[..., 2] = 7.5
    words, scale, offset = ops.kv_pack(x, order, count, 4, "channel", 0.5, False)
    transposed = ops.kv_pack(x, order, count, 4, "channel", 0.5, True)[0]
    assert torch.equal(unpack_words(transposed, 4, True), unpack_words(words, 4))
    assert transposed.is_contiguous()
    value = unpack_words(words, 4)[0, :, :13, 2] * scale[0, :, 0, 2, None] + offset[0, :, 0, 2, None]
    assert (value == 7.5).all()


def test_kv_pack__opcheck_and_errors() -> None:
    x, order, count = operands()
    for by in ("channel", "token", "tensor"):
        torch.library.opcheck(ops.kv_pack.default, (x, order, count, 2, by, 1.0, True))
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bits"):
        ops.kv_pack(x, order, count, 3, "channel", 1.0, False)
    with pytest.raises(ValueError, match="values have 6 channels"):
        ops.kv_pack(x[..., :6], order, count, 2, "channel", 1.0, True)
    with pytest.raises(ValueError, match="'head'"):
        ops.kv_pack(x, order, count, 2, "head", 1.0, False)
    with pytest.raises(ValueError, match="count"):
        ops.kv_pack(x, order, count[:1], 2, "channel", 1.0, False)
