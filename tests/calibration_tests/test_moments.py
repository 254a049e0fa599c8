"""Second moments: exact products, and no error that grows with the number of rows."""

import pytest
import torch

from mmqc.calibration import moments

ONE_CHUNK = 2**-21  # 2,048 terms added in float32; their mean error is far below the worst case of 2^-13


def rows(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(count, width, generator=g) + 1).to(dtype)


def relative(h: torch.Tensor, x: torch.Tensor) -> float:
    exact = x.double().T @ x.double()
    return float((h - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("panel", [5, 16, 2048])
def test_moment__is_the_sum_over_all_rows(dtype: torch.dtype, panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "PANEL", panel)
    monkeypatch.setattr(moments, "ROWS", 7)
    x = rows(40, 16, dtype)
    h = None
    for part in x.split(13):
        h = moments.add_second_moment(h, part)
    assert h is not None
    h = moments.mirror_(h)
    assert torch.equal(h, h.T)
    assert relative(h, x) < (2**-50 if dtype == torch.float64 else ONE_CHUNK)


def test_moment__does_not_lose_more_with_more_rows() -> None:
    x = rows(100_000, 4, torch.bfloat16)
    h, narrow = None, torch.zeros(4, 4)
    for part in x.split(100):
        h = moments.add_second_moment(h, part)
        narrow += part.float().T @ part.float()
    assert h is not None
    assert relative(h, x) < 2**-24
    assert relative(narrow.double(), x) > 2**-24


@pytest.mark.parametrize("width", [1, 7, 12, 13])
def test_narrowed__is_the_moment_in_float32_in_its_own_memory(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "PANEL", 5)
    h = torch.randn(width, width, dtype=torch.float64)
    want, memory = h.float(), h.data_ptr()
    narrow = moments.narrowed_(h)
    assert torch.equal(narrow, want)
    assert narrow.data_ptr() == memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_drift__is_the_sum_over_all_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "PANEL", 5)
    monkeypatch.setattr(moments, "ROWS", 7)
    y, error = rows(40, 16, dtype), rows(40, 16, dtype, seed=1) - 1
    d = None
    for left, right in zip(error.split(13), y.split(13), strict=True):
        d = moments.add_drift(d, left, right, 0.5)
    exact = 0.5 * error.double().T @ y.double()
    assert d is not None
    assert float((d - exact).norm() / exact.norm()) < (2**-50 if dtype == torch.float64 else 2**-20)
