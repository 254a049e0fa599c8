"""Calls on other streams wait on the device; on a GPU that is not there, and on one that is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import mmqc
from mmqc.front.streams import Streams, devices_of


class Device:
    """Streams by name, and who waited for whom."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.captured, self.waits = "a", False, list[tuple[str, str]]()
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, self.now, device))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captured)

    def call(self, streams: Streams, now: str) -> None:
        self.now = now
        streams.follow({0})


class Stream:
    def __init__(self, of: Device, name: str, device: int) -> None:
        self.of, self.name, self.device = of, name, device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    __hash__ = None  # type: ignore[assignment]

    def wait_stream(self, other: Any) -> None:
        self.of.waits.append((self.name, other.name))


def test_streams__another_one_waits_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    device, streams = Device(monkeypatch), Streams()
    for name in "aabbac":
        device.call(streams, name)
    assert device.waits == [("b", "a"), ("a", "b"), ("c", "a")]


def test_streams__what_is_captured_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    device, streams = Device(monkeypatch), Streams()
    device.call(streams, "a")
    device.captured = True
    device.call(streams, "side")
    device.captured = False
    device.call(streams, "a")
    assert not device.waits


def test_streams__inputs_on_the_cpu_have_none() -> None:
    assert not devices_of({"x": torch.ones(2), "n": 1})


@pytest.mark.gpu
def test_compiled_model__two_threads_on_streams_of_their_own() -> None:
    """A product whose tiles are cut along K, so that a launch counts parts."""
    model = nn.Sequential(nn.Linear(8192, 256, bias=False)).cuda().bfloat16()
    mmqc.quantize_(model, mmqc.recipes.rtn(weight_bits=4), progress=False)
    model.compile(backend="mmqc", dynamic=False)
    given = [torch.randn(4, 8192, device="cuda").bfloat16() for _ in range(2)]
    with torch.no_grad():
        want = [model(x) for x in given]
        torch.cuda.synchronize()
        wrong = []

        def run(which: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                for _ in range(300):
                    if not torch.equal(model(given[which]), want[which]):
                        wrong.append(which)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
