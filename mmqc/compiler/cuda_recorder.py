"""What records launches and replays them: CUDA graphs of one pool.

pool    outlives the last of what was recorded: PyTorch refuses one whose graphs are all gone, as they are when what seemed to
        stay has moved
ranks   of a process group let go what may hold its communicators before it ends (distributed/ending.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch

from mmqc.distributed.ending import before_the_group_ends
from mmqc.distributed.group import in_group
from mmqc.graph.collections_off import without_collections

WAITING = 1.5  # the device ran for less than so many times what the host took: it waited for launches

Replay = Callable[[], None]


class Cuda:
    """CUDA graphs of one pool, on the stream of the first call: a ``recorded_sizes.Device``."""

    kind = "cuda"

    def __init__(self) -> None:
        self.stream: Any = None
        self.pool: Any = None
        self.kept: Any = None  # a graph of the pool that is never dropped
        self.ran: Any = None

    def usable(self) -> bool:
        """On the first call's stream, outside of captures."""
        if torch.cuda.is_current_stream_capturing():
            return False
        now = torch.cuda.current_stream()
        if self.stream is None:
            self.stream = now
        return bool(now == self.stream)

    def timed(self, run: Callable[[], Any], short: float = 0.0) -> tuple[Any, Callable[[], bool | None]]:
        """By events, which are looked at later; ranks, which might not agree on that, say that it waited."""
        if in_group():
            return run(), lambda: True
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin = time.perf_counter()
        result = run()
        host = 1e3 * (time.perf_counter() - begin)
        end.record()
        return result, lambda: start.elapsed_time(end) < max(WAITING * host, short) if end.query() else None

    def record(self, run: Callable[[], Any], beside: bool = False) -> tuple[Any, Replay]:
        """On a stream of its own, for the usual one is never captured."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            _, self.kept = self._graph_of(lambda: torch.empty(1, device=self.kind).zero_())
        with _memory_of_launches(beside):
            result, graph = self._graph_of(run)
        if in_group() and not beside:  # beside others it meets nobody (regions.py)
            _WITH_RANKS.add(graph)
            before_the_group_ends(_let_go)
        return result, graph.replay

    def _graph_of(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), without_collections(), _captured(graph, self.pool):
            result = run()
        torch.cuda.current_stream().wait_stream(side)
        return result, graph

    def beside(self, run: Callable[[], Any]) -> None:
        """On another stream, one for all such: what the host asks of the usual one is not kept waiting."""
        device = torch.cuda.current_device()
        side = _BESIDE[device] if device in _BESIDE else _BESIDE.setdefault(device, torch.cuda.Stream())
        self.ran = self.ran or torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
            self.ran.record()

    def joined(self) -> None:
        """What comes next on the usual stream waits."""
        torch.cuda.current_stream().wait_event(self.ran)


_BESIDE: dict[int, Any] = {}  # a stream for each device: what runs on it shares counters
_WITH_RANKS: WeakSet[Any] = WeakSet()  # CUDA graphs that may have collectives in them


def _let_go() -> None:
    """End these, and Inductor's: what was compiled with them is compiled anew where it is called again."""
    for graph in list(_WITH_RANKS):
        graph.reset()
    torch.compiler.reset()


@contextmanager
def _memory_of_launches(beside: bool) -> Iterator[None]:
    """Sums, and counters where others run at the same time, of their own for launches that are recorded; of triton's."""
    try:
        from mmqc.kernels.shared.split_k import counters_beside, recording
    except ImportError:
        yield
        return
    device = torch.device("cuda", torch.cuda.current_device())
    with recording(), counters_beside(device) if beside else nullcontext():
        yield


@contextmanager
def _captured(graph: Any, pool: Any) -> Iterator[None]:
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads go on with what they do
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # says again what ended it
            graph.capture_end()
        raise
    graph.capture_end()
