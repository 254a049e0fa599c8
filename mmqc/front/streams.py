"""Calls of one model on several CUDA streams come one behind the other on the device, as turns put them on the host.

    call on stream A, then on B        B waits for what A was given so far
    always the same stream             nothing: one number is compared

Why:     a compiled graph has counters for tiles that programs share, zero before and after each launch, and CUDA graphs have
         memory of their own: two runs of it at once would end each other's tiles.  A thread takes its turn with a call, but what
         the call launched still runs when the next thread has the turn, and on another stream nothing keeps them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Streams:
    """Where the last call of a model was launched, by device."""

    def __init__(self) -> None:
        self.last: dict[int, Any] = {}

    def follow(self, devices: Iterable[int]) -> None:
        """The current stream of each of these devices waits for the last call's; not while it is captured."""
        for device in devices:
            now, last = torch.cuda.current_stream(device), self.last.get(device)
            if now == last or torch.cuda.is_current_stream_capturing():
                continue
            if last is not None:
                now.wait_stream(last)
            self.last[device] = now


def devices_of(inputs: Mapping[str, Any]) -> set[int]:
    """The GPUs that a call's tensors are on."""
    return {x.device.index for x in inputs.values() if isinstance(x, Tensor) and x.is_cuda}
