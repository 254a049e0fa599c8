"""Weights that nobody computes with any more, on their way from an accelerator to host memory behind the work that goes on.

    evict    take a tensor off its accelerator; how to get it back        close    what is not copied yet stays where it is

Threads copy, each on a stream of its own that waits for what wrote the tensor.  Until the last byte of a copy has arrived the
tensor itself is kept, so that nothing is lost if a copy fails or is never made.  At most ``UNDER_WAY`` bytes wait at a time: so
much more device memory is in use than if every copy were waited for.

Why:     a copy into fresh host memory is made page by page, at about 1 GB/s a thread: a quarter of a minute for the weights of
         an 8B model, in which neither the device nor the other ranks had anything to do.
Why not: keeping the weights on the device where there is room needs no copies, but whether there is room is not known before
         the widest block has been solved, and a guess that was wrong is an error in the middle of the work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

UNDER_WAY = 1 << 30  # bytes
PIECE = 1 << 25  # bytes of pinned memory, through which each thread's copies go: pageable copies would hold up the device
THREADS = 4  # pages are found by whoever writes to them first


class Evicted:
    """A tensor that leaves its accelerator.

    Attributes:
        source: the tensor, until it is in host memory.
        host: the copy.  Its values are there once ``source`` is not.
    """

    def __init__(self, source: Tensor) -> None:
        self.device = source.device
        self.source: Tensor | None = source
        self.host = torch.empty_like(source, device="cpu")

    def back(self) -> Tensor:
        """The tensor on its accelerator again."""
        source = self.source  # a worker may let go of it meanwhile
        return self.host.to(self.device) if source is None else source


class Eviction:
    """Copies tensors to host memory, ``THREADS`` of them at a time."""

    def __init__(self) -> None:
        self.workers: ThreadPoolExecutor | None = None  # the first eviction starts them: models in host memory never do
        self.own = threading.local()  # of each worker: its piece of pinned memory, its streams by device
        self.under_way: deque[tuple[Future[None], int]] = deque()
        self.closed = False

    def evict(self, source: Tensor, left: Callable[[Evicted], Any]) -> None:
        """Copy ``source`` to host memory some time from now.

        Args:
            source: a tensor without history; nobody writes to it from here on.
            left: called with what becomes of it before the copy begins; has to let go of ``source``.

        Raises:
            Exception: what an earlier copy failed with.  Its tensor is where it was.
        """
        self._make_room(source.nbytes)
        evicted = Evicted(source)
        left(evicted)
        if self.workers is None:
            self.workers = ThreadPoolExecutor(THREADS, "mmqc eviction")
        written = torch.cuda.current_stream(source.device).record_event() if source.is_cuda else None
        if not source.is_cuda and not source.is_cpu:  # another accelerator: no streams are told apart
            torch.accelerator.synchronize(source.device)
        self.under_way.append((self.workers.submit(self._copy, evicted, written), source.nbytes))

    def close(self) -> None:
        """Nothing is copied from here on; what was under way is on its accelerator."""
        self.closed = True
        if self.workers is not None:
            self.workers.shutdown(cancel_futures=True)
        self.under_way.clear()

    def _make_room(self, size: int) -> None:
        """Wait until ``size`` bytes more may be under way; a single larger tensor may, alone."""
        while self.under_way and (self.under_way[0][0].done() or sum(n for _, n in self.under_way) + size > UNDER_WAY):
            self.under_way[0][0].result()
            self.under_way.popleft()

    @torch.no_grad()
    def _copy(self, evicted: Evicted, written: Any) -> None:
        """A worker's part."""
        source = evicted.source
        if source is not None and self._copied(source, evicted.host, written):
            evicted.source = None

    def _copied(self, source: Tensor, host: Tensor, written: Any) -> bool:
        """Copy; False if ``close`` came first."""
        if written is None:
            host.copy_(source)
            return True
        with torch.cuda.device(source.device):
            if not hasattr(self.own, "piece"):
                self.own.piece, self.own.streams = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), {}
            stream = self.own.streams.get(source.device) or torch.cuda.Stream()
            self.own.streams[source.device] = stream
            with torch.cuda.stream(stream):
                stream.wait_event(written)
                return self._by_pieces(source, host, stream)

    def _by_pieces(self, source: Tensor, host: Tensor, stream: torch.cuda.Stream) -> bool:
        if not (source.is_contiguous() and host.is_contiguous()):
            host.copy_(source)
            return True
        parts = (tensor.view(-1).view(torch.uint8).split(PIECE) for tensor in (source, host))
        for part, place in zip(*parts, strict=True):
            if self.closed:
                return False
            piece = self.own.piece[: part.numel()].copy_(part, non_blocking=True)
            stream.synchronize()
            place.numpy()[:] = piece.numpy()  # by this thread alone: torch would have all cores do it, which the work needs
        return True
