"""One thread: the models are so small that a second one only waits, ten times longer than the work takes."""

from collections.abc import Iterator

import pytest
import torch

import mmqc.backend

torch.set_num_threads(1)


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the graphs that the backend made as they are."""
    monkeypatch.setattr(mmqc.backend, "_lower", lambda gm, inputs, request, record: gm.forward)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
