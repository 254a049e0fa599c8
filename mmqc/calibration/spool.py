"""Activations that wait for the next block: in host memory (pinned where they come from an accelerator) or in files.

Whatever is taken out is a copy, so that a block may write to its inputs.  Of what an accelerator put, copies back run beside what
it computes: on a stream of their own, behind the copy out, at most AHEAD of them before the ones that are read.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

AHEAD = 16  # copies: bounds what they hold on the accelerator


@dataclass(frozen=True)
class _Pinned:
    """A tensor in pinned memory, whole once ``written`` has happened."""

    host: Tensor
    written: torch.cuda.Event


class Spool:
    """``put`` gives a ticket, ``get`` the tensor for a ticket on a device, ``drop`` frees it.

    Args:
        folder: where files go, in a folder of their own that ``close`` removes; None means host memory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder: Path | None = None
        self.numbers = itertools.count()
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.taken: deque[torch.cuda.Event] = deque()
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="activations-", dir=folder))

    def close(self) -> None:
        """Delete what is left."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def put(self, value: Any) -> Any:
        """Store a tensor; other values are their own tickets."""
        if not isinstance(value, Tensor):
            return value
        if self.folder is not None:
            from safetensors.torch import save_file

            path = self.folder / f"{next(self.numbers)}.safetensors"
            save_file({"x": value.detach().contiguous()}, path)
            return path
        if not value.is_cuda:
            return value.detach().clone(memory_format=torch.contiguous_format)
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value.detach(), non_blocking=True)
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(value.device))
        return _Pinned(host, written)

    def get(self, ticket: Any, device: torch.device) -> Any:
        """A copy on ``device``."""
        if isinstance(ticket, Path):
            from safetensors.torch import load_file

            return load_file(ticket)["x"].to(device)
        if isinstance(ticket, _Pinned):
            return self._copied(ticket, device)
        return ticket.to(device, copy=True) if isinstance(ticket, Tensor) else ticket

    def _copied(self, ticket: _Pinned, device: torch.device) -> Tensor:
        """What was put by an accelerator, on any device."""
        if device.type == "cpu":
            ticket.written.synchronize()
            return ticket.host.clone()
        if len(self.taken) == AHEAD:
            self.taken.popleft().synchronize()
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream, now = self.streams[device], torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            stream.wait_event(ticket.written)
            copy = ticket.host.to(device, non_blocking=True)
        now.wait_stream(stream)
        copy.record_stream(now)
        read = torch.cuda.Event()
        read.record(now)
        self.taken.append(read)
        return copy

    def drop(self, ticket: Any) -> None:
        """Delete its file, if it is one."""
        if isinstance(ticket, Path):
            ticket.unlink(missing_ok=True)
