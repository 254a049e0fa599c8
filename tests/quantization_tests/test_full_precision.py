"""TF32 is off in the block and as before behind it, by both names of each switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mmqc.quantization.full_precision import full_float32

CONV, MATMUL = torch.backends.cudnn.conv, torch.backends.cuda.matmul  # type: ignore[attr-defined]


def switches() -> list[Any]:
    """By all their names; "mixed" where PyTorch does not say."""

    def read(switch: Callable[[], Any]) -> Any:
        try:
            return switch()
        except RuntimeError:
            return "mixed"

    old = read(lambda: torch.backends.cudnn.allow_tf32), read(lambda: MATMUL.allow_tf32), read(torch.get_float32_matmul_precision)
    return [CONV.fp32_precision, MATMUL.fp32_precision, *old]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = CONV.fp32_precision, MATMUL.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    CONV.fp32_precision, MATMUL.fp32_precision = before


def by_old_names(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = MATMUL.allow_tf32 = allowed


def by_new_names(precision: str) -> None:
    CONV.fp32_precision = MATMUL.fp32_precision = precision


@pytest.mark.parametrize(
    ("set_", "to"),
    [
        (bool, ""),
        *((torch.set_float32_matmul_precision, each) for each in ("highest", "high", "medium")),
        *((by_old_names, each) for each in (True, False)),
        *((by_new_names, each) for each in ("tf32", "ieee")),
    ],
)
def test_full_float32__and_back(set_: Any, to: Any) -> None:
    set_(to)
    before = switches()
    with full_float32():
        conv, matmul, old, _, precision = switches()
        assert conv in ("ieee", "none")
        assert matmul == "ieee"
        assert old is not True
        assert precision in ("highest", "mixed")
    assert switches() == before


@pytest.mark.gpu
def test_full_float32__a_convolution_is_one_of_float32() -> None:
    x, w = (torch.randn(64, 3, 14, 14, device="cuda") for _ in range(2))
    exact = torch.nn.functional.conv2d(x.double(), w.double())
    with full_float32():
        error = (torch.nn.functional.conv2d(x, w).double() - exact).norm() / exact.norm()
    assert error < 1e-6
