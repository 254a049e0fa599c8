"""Counters of launches: a ring, and another one for what is recorded to run beside other launches."""

from __future__ import annotations

import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mmqc.kernels.shared import split_k
from mmqc.kernels.shared.split_k import ALIGNED, RING, SUMS, counters_beside, recording, workspace

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def counters(tiles: int) -> Tensor:
    return workspace(CPU, tiles, 8, 2, torch.float32)[1]


def inside(part: Tensor, other: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_workspace__counters_are_zero_and_begin_where_wide_loads_do() -> None:
    found = [counters(n) for n in (5, 1, 7)]
    assert [len(part) for part in found] == [5, 1, 7]
    assert all(not part.any() and part.storage_offset() % ALIGNED == 0 for part in found)
    starts = [part.storage_offset() for part in found]
    assert starts[1] == starts[0] + 8
    assert starts[2] == starts[1] + 4


def test_workspace__begins_anew_at_the_end_of_the_ring() -> None:
    counters(RING - ALIGNED)
    assert counters(2 * ALIGNED).storage_offset() == 0
    assert not inside(counters(RING + 1), counters(1)), "more than the ring has"


def test_counters_beside__are_no_others() -> None:
    usual = counters(3)
    with counters_beside(CPU):
        beside = [counters(3), counters(3)]
        elsewhere: list[Tensor] = []
        thread = threading.Thread(target=lambda: elsewhere.append(counters(3)))
        thread.start()
        thread.join()
    assert inside(beside[0], beside[1])
    assert not inside(beside[0], usual)
    assert inside(elsewhere[0], usual), "another thread's launches are not what is recorded"
    assert inside(counters(3), usual)


def sums(tiles: int) -> Tensor:
    return workspace(CUDA, tiles, 8, 2, torch.int32, True)[0]


def test_workspace__threads_have_counters_of_their_own(monkeypatch) -> None:
    class Interrupted(dict):
        """The other thread runs whenever this one has looked something up."""

        def get(self, *key: Any) -> Any:
            found = super().get(*key)
            time.sleep(0.01)
            return found

    monkeypatch.setattr(split_k, "_next", Interrupted())
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(counters, [3] * 8))
    assert len({each.data_ptr() for each in taken}) == 8


def test_workspace__sums_are_a_streams_own_and_grow(monkeypatch) -> None:
    now = a_device_of_streams(monkeypatch)
    first = sums(3)
    assert first.shape == (24,)
    assert not first.any()
    assert inside(sums(5), first), "a launch behind it on the same stream"
    now.stream = 8
    assert not inside(sums(3), first)
    now.stream = 7
    assert not now.left
    more = sums(SUMS)
    assert len(more) == 8 * SUMS
    assert not inside(more, first)
    assert inside(sums(3), more)
    assert now.left == [(first.data_ptr(), 7)], "until the launches that are queued there are over"
    assert threading.get_ident() not in now.makers, "whose memory belongs to a graph, while one is warmed up"


def test_workspace__sums_of_a_recording_are_zeroed_in_it(monkeypatch) -> None:
    now = a_device_of_streams(monkeypatch)
    usual = sums(3)
    now.captured = True
    assert not inside(sums(3), sums(3)), "whose order nobody knows"
    now.makers.clear()
    with recording():
        first = sums(3)
        assert now.makers == {threading.get_ident()}
        assert inside(sums(5), first)
    with recording():
        assert not inside(sums(3), first)
    now.captured = False
    assert inside(sums(3), usual)


def a_device_of_streams(monkeypatch: Any) -> Any:
    """The CPU as a CUDA device; what its current stream is, and whether it is captured, is said."""
    now = types.SimpleNamespace(stream=7, captured=False, left=[], makers=set())
    zeros = torch.zeros

    def made(*sizes: int, device: Any = None, **more: Any) -> Tensor:
        now.makers.add(threading.get_ident())
        return zeros(*sizes, **more)

    stream = lambda *_: types.SimpleNamespace(cuda_stream=now.stream, synchronize=lambda: None)  # noqa: E731
    monkeypatch.setattr(split_k, "_sums", {})
    monkeypatch.setattr(torch, "zeros", made)
    monkeypatch.setattr(Tensor, "record_stream", lambda t, stream: now.left.append((t.data_ptr(), stream.cuda_stream)))
    monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **more: zeros(*sizes, **more))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.captured)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(split_k, "_counters", {(CUDA, False): zeros(RING, dtype=torch.int32)})
    return now
