import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqc.ops.pack import PACKED, check_packed, pack, packed_width, stored_bits, stretch, unpack


def codes(rows: int, width: int, bits: int, seed: int) -> torch.Tensor:
    top = 2 ** (bits - 1)
    return torch.randint(-top, top, (rows, width), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=90)
@given(rows=st.integers(1, 9), width=st.integers(1, 300), bits=st.sampled_from([*PACKED, 8]), seed=st.integers(0, 2**31))
def test_pack__unpack_is_its_inverse(rows: int, width: int, bits: int, seed: int) -> None:
    q = codes(rows, width, bits, seed)
    packed = q if bits == 8 else pack(q, bits)
    assert packed.shape == (rows, packed_width(width, bits))
    check_packed(packed, width, bits)
    assert torch.equal(unpack(packed, width, bits), q)


def test_pack__layout_of_four_bits() -> None:
    q = torch.tensor([[-8, 0, 7, 1, 2]], dtype=torch.int8)
    assert pack(q, 4).tolist() == [[0 | 9 << 4, 8 | 10 << 4, 15 | 8 << 4]]


def test_pack__layout_of_two_bits() -> None:
    q = torch.tensor([[-2, -1, 0, 1, 1, 0]], dtype=torch.int8)  # L = 2: columns 0 2 4 - and 1 3 5 -
    assert pack(q, 2).tolist() == [[0 | 2 << 2 | 3 << 4 | 2 << 6, 1 | 3 << 2 | 2 << 4 | 2 << 6]]


def test_pack__layout_of_three_bits() -> None:
    q = codes(1, 16, 3, 0)
    u = (q + 4).tolist()[0]
    low = [sum((u[j + 4 * t] & 3) << (2 * t) for t in range(4)) for j in range(4)]
    high = [sum((u[i + 2 * t] >> 2) << t for t in range(8)) for i in range(2)]
    assert pack(q, 3).tolist() == [low + high]


@pytest.mark.parametrize(("bits", "share"), [(2, 1 / 4), (3, 3 / 8), (4, 1 / 2), (8, 1)])
def test_packed_width__is_what_the_bits_need(bits: int, share: float) -> None:
    assert packed_width(4096, bits) == 4096 * share
    assert stretch(4096, bits) <= packed_width(4096, bits)


def test_stored_bits__integer_inputs_need_four_or_eight() -> None:
    assert [stored_bits(b, integer_inputs=False) for b in (2, 3, 4, 6, 8)] == [2, 3, 4, 8, 8]
    assert [stored_bits(b, integer_inputs=True) for b in (2, 3, 4, 6, 8)] == [4, 4, 4, 8, 8]


@pytest.mark.parametrize(
    ("dtype", "width", "bits"),
    [(torch.int8, 8, 4), (torch.uint8, 6, 4), (torch.uint8, 8, 8), (torch.int8, 8, 3), (torch.uint8, 2, 3), (torch.int8, 8, 5)],
)
def test_check_packed__refuses(dtype: torch.dtype, width: int, bits: int) -> None:
    with pytest.raises(ValueError, match="weight"):
        check_packed(torch.zeros(3, width, dtype=dtype), 8, bits)
