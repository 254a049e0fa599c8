"""CUDA graphs of one pool; what needs a GPU is in gpu_tests/test_recorded_sizes.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mmqc.compiler import cuda_recorder
from mmqc.compiler.cuda_recorder import Cuda


def test_cuda__ranks_do_not_time_what_they_might_not_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_recorder, "in_group", lambda: True)
    result, waited = Cuda().timed(lambda: 5)
    assert (result, waited()) == (5, True)


@pytest.mark.parametrize(("short", "waited"), [(0.0, False), (100.0, True)])
def test_cuda__a_short_call_is_as_one_that_waited_if_asked(monkeypatch: pytest.MonkeyPatch, short: float, waited: bool) -> None:
    event = Mock(elapsed_time=lambda end: 60.0, query=lambda: True)  # ms, which no host takes for nothing
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(cuda_recorder, "in_group", lambda: False)
    assert Cuda().timed(lambda: 5, short)[1]() is waited


@pytest.mark.parametrize("ranks", [False, True], ids=["alone", "ranks"])
def test_cuda__ranks_let_their_recordings_go_before_the_group_ends(monkeypatch: pytest.MonkeyPatch, ranks: bool) -> None:
    ends: list[Any] = []
    made = [Mock(name=f"graph {i}") for i in range(4)]
    graphs = iter(made)
    for name in ("Stream", "graph_pool_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: next(graphs))
    monkeypatch.setattr(torch.compiler, "reset", Mock())
    monkeypatch.setattr(cuda_recorder, "in_group", lambda: ranks)
    monkeypatch.setattr(cuda_recorder, "before_the_group_ends", ends.append)
    monkeypatch.setattr(Cuda, "kind", "cpu")
    monkeypatch.setattr(cuda_recorder, "_memory_of_launches", nullcontext)
    device = Cuda()
    assert [device.record(lambda i=i: i)[0] for i in range(2)] == [0, 1]
    assert device.record(lambda: 2, beside=True)[0] == 2
    assert made[0].capture_begin.called, "one that keeps the pool"
    assert {*ends} == ({cuda_recorder._let_go} if ranks else set())
    cuda_recorder._let_go()
    assert [m.reset.called for m in made] == [False, ranks, ranks, False], "a tower that runs ahead is still known to its loop"
    assert torch.compiler.reset.called  # type: ignore[attr-defined]
