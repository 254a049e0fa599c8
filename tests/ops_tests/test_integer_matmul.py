import pytest
import torch

from mmqc.ops import integer_matmul
from mmqc.ops.integer_matmul import cuda_padding, int_matmul, why_not_int_mm

SIZES = [1, 17, 63, 100, 257]


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("n", [1, 17, 100])
@pytest.mark.parametrize("k", SIZES)
def test_int_matmul__exact(m: int, n: int, k: int, loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_matmul, "cpu_int_mm_is_a_loop", lambda: loop)
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    w = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    acc = int_matmul(x, w)
    assert acc.dtype == torch.int32
    assert torch.equal(acc.double(), x.double() @ w.double().T)


def test_int_matmul__without_int_mm_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_matmul, "cpu_int_mm_is_a_loop", lambda: False)
    x, w = (torch.randint(-128, 128, (s, 257), dtype=torch.int8) for s in (17, 63))
    fast = int_matmul(x, w)
    monkeypatch.setattr(integer_matmul, "why_not_int_mm", lambda *_: "no")
    assert torch.equal(int_matmul(x, w), fast)


def test_int_matmul__extreme_codes() -> None:
    x, w = torch.full((3, 1000), -128, dtype=torch.int8), torch.full((2, 1000), -128, dtype=torch.int8)
    assert (int_matmul(x, w) == 1000 * 16384).all()


def test_int_matmul__no_rows() -> None:
    assert int_matmul(torch.zeros(0, 8, dtype=torch.int8), torch.zeros(3, 8, dtype=torch.int8)).shape == (0, 3)


def test_int_matmul__a_single_row_may_have_any_stride() -> None:
    x, w = torch.randint(-128, 128, (1, 96), dtype=torch.int8), torch.randint(-128, 128, (40, 96), dtype=torch.int8)
    for stride in (0, 1, 7):
        assert torch.equal(int_matmul(x.as_strided((1, 96), (stride, 1)), w), int_matmul(x, w))
        assert torch.equal(int_matmul(w, x.as_strided((1, 96), (stride, 1))), int_matmul(x, w).T)


def test_why_not_int_mm__cuda_limits() -> None:
    assert why_not_int_mm("cuda", True, 64, 64) is None
    assert "rows" in (why_not_int_mm("cuda", False, 64, 64) or "")
    assert "multiples of 8" in (why_not_int_mm("cuda", True, 63, 64) or "")
    assert "float64" in (why_not_int_mm("xpu", True, 64, 64) or "")
    assert "N of 16 where K is under 128" in (why_not_int_mm("cuda", True, 4136, 32) or "")
    assert why_not_int_mm("cuda", True, 4136, 128) is None
    assert cuda_padding(1, 63, 100) == (16, 1, 4)
    assert cuda_padding(2048, 4136, 32) == (0, 8, 0)
