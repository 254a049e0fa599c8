import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqc.ops.pack import check_packed, pack_int4, packed_width, unpack_int4


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(1, 9), width=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_pack_int4__unpack_is_its_inverse(rows: int, width: int, seed: int) -> None:
    q = torch.randint(-8, 8, (rows, width), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    packed = pack_int4(q)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, packed_width(width, 4))
    assert torch.equal(unpack_int4(packed, width), q)


def test_pack_int4__layout() -> None:
    q = torch.tensor([[-8, 0, 7, 1, 2]], dtype=torch.int8)
    assert pack_int4(q).tolist() == [[0 | 9 << 4, 8 | 10 << 4, 15 | 8 << 4]]


@pytest.mark.parametrize(
    ("dtype", "width", "bits"),
    [(torch.int8, 8, 4), (torch.uint8, 6, 4), (torch.uint8, 8, 8), (torch.int8, 8, 3)],
)
def test_check_packed__refuses(dtype: torch.dtype, width: int, bits: int) -> None:
    with pytest.raises(ValueError, match="weight"):
        check_packed(torch.zeros(3, width, dtype=dtype), 8, bits)
