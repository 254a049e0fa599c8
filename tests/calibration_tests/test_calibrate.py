"""Second moments: exact products, no error that grows with the number of rows, weights per modality."""

import pytest
import torch

from mmqc.calibration import moments
from mmqc.calibration.calibrate import MIXED, TEXT, VISUAL, InputStatistics, Observer, Watch
from mmqc.nn.modality import ModalityContext

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


def test_moment__weights_are_per_modality() -> None:
    x = rows(6, 3, torch.float32).reshape(2, 3, 3)
    context = ModalityContext()
    context.visual = torch.tensor([[True, False, True], [False, False, True]])
    module = torch.nn.Linear(3, 3)
    weights = {TEXT: 0.25, VISUAL: 4.0, MIXED: 1.0}
    observer = Observer(Watch(module, True, None, True, row_weights=weights), context)
    observer.update(x)
    seen = observer.seen.finish()
    flat, visual = x.reshape(-1, 3).double(), context.visual.reshape(-1)
    factor = torch.where(visual, 4.0, 0.25).double()[:, None]
    assert seen.hessian is not None
    assert relative(seen.hessian, flat * factor.sqrt()) < ONE_CHUNK
    assert (seen.rows, dict(seen.row_weights)) == (6, weights)


def test_moment__equal_weights_do_not_split_the_rows() -> None:
    x = rows(6, 3, torch.float32)
    seen, whole = InputStatistics(), moments.mirror_(moments.add_second_moment(None, x))
    seen.add_moment({VISUAL: x[:2], TEXT: x[2:]}, x)
    assert torch.equal(seen.finish().hessian, whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 7, 12, 13])
def test_narrowed__is_the_moment_in_float32_in_its_own_memory(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "PANEL", 5)
    h = torch.randn(width, width, dtype=torch.float64)
    want, memory = h.float(), h.data_ptr()
    narrow = moments.narrowed_(h)
    assert torch.equal(narrow, want)
    assert narrow.data_ptr() == memory
