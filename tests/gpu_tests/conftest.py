"""Convolutions in float32, as on the CPU: cuDNN takes TF32 unless told otherwise, and a patch embedding is a convolution.

And nothing of Dynamo from the test before: code that was compiled too often there would not be compiled here.
"""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def float32_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
