"""The ops by their kernels, also where nothing that installs them was imported: a reference always equals itself.

Convolutions in float32, as on the CPU: cuDNN takes TF32 unless told otherwise, and a patch embedding is a convolution.  And nothing
of Dynamo from the test before: code that was compiled too often there would not be compiled here.
"""

import pytest
import torch

from mmqc import kernels


@pytest.fixture(autouse=True, scope="session")
def installed_kernels() -> None:
    assert kernels.install() or not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def float32_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
