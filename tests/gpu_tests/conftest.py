"""Convolutions in float32, as on the CPU: cuDNN takes TF32 unless told otherwise, and a patch embedding is a convolution."""

import pytest
import torch


@pytest.fixture(autouse=True)
def float32_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
