"""Several programs share one output tile, each with a part of K; the last to finish adds the parts in a fixed order.

    part[s, tile] = sum over the k of split s       acc = part[0] + part[1] + …      (bitwise reproducible)

Why:     a second launch to add the parts costs more than a skinny matmul has to give.  The counters of a launch are zero
         before it and zero after it, so a captured CUDA graph replays.
Added:   integers, whose order does not matter, are added where they lie: the last to finish reads one tile, not all parts of it.
         Such sums too are zero before and after, in memory that one stream, or one recording, has for all its launches.
Threads: they take turns at the ring and at what is made once; two that were given the same counters would end each other's tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton
import triton.language as tl
from torch import Tensor

RING = 1 << 20
SUMS = 1 << 20  # integers at once: launches of more are rare
ALIGNED = 4  # counters in 16 bytes, so that a kernel is compiled for one kind of address
Workspace = Callable[..., tuple[Tensor, Tensor]]  # as ``workspace`` below
_counters: dict[tuple[torch.device, bool], Tensor] = {}
_next: dict[tuple[torch.device, bool], int] = {}
_sums: dict[tuple[torch.device, int], Tensor] = {}  # by stream
_recorded: ContextVar[dict[tuple[torch.device, int], Tensor] | None] = ContextVar("sums of what is recorded", default=None)
_turn = threading.Lock()
_beside: ContextVar[bool] = ContextVar("whether launches are recorded that will run beside others", default=False)


@contextmanager
def counters_beside(device: torch.device) -> Iterator[None]:
    """Launches meanwhile take counters from a ring of their own: recorded, they may run while launches of the other ring do.

    Recordings made so must not run at the same time as each other.
    """
    token = _beside.set(True)
    try:
        with _turn:
            if (device, True) not in _counters:
                _counters[device, True] = _lasting_zeros(device, RING)
        yield
    finally:
        _beside.reset(token)


@contextmanager
def recording() -> Iterator[None]:
    """Launches meanwhile, which are captured one behind the other, share their sums: these are zeroed once in a replay."""
    token = _recorded.set({})
    try:
        yield
    finally:
        _recorded.reset(token)


def workspace(
    device: torch.device, tiles: int, tile_elements: int, split: int, dtype: torch.dtype, added: bool = False
) -> tuple[Tensor, Tensor]:
    """Partial sums [split, tiles, tile] and zeroed counters [tiles]; or, ``added``, zeroed sums [tiles, tile] of int32.

    Counters come from a ring, so launches on different streams, or in different graphs, meet only after a thousand others.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if added and split > 1:
        parts = _zeroed(device, tiles * tile_elements, capturing)
    else:
        parts = torch.empty(split * tiles * tile_elements if split > 1 else 1, dtype=dtype, device=device)
    if split == 1:
        return parts, parts.view(torch.int32)
    ring = device, _beside.get()
    if tiles > RING or (capturing and ring not in _counters):
        # Memory that a capture hands out is filled at replay only: such a buffer must not be shared.
        return parts, torch.zeros(tiles, dtype=torch.int32, device=device)
    with _turn:
        if ring not in _counters:
            _counters[ring] = _lasting_zeros(device, RING)
        start = _next.get(ring, 0)
        start = 0 if start + tiles > RING else start
        _next[ring] = start + -(-tiles // ALIGNED) * ALIGNED
    return parts, _counters[ring][start : start + tiles]


def _zeroed(device: torch.device, elements: int, capturing: bool) -> Tensor:
    """Sums that are zero, and that a launch leaves so: a stream's, or a recording's; in captures of others, its own."""
    kept = None if device.type != "cuda" else _recorded.get() if capturing else _sums
    if kept is None:
        return torch.zeros(elements, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device)
    key = device, stream.cuda_stream
    with _turn:
        if key not in kept or len(kept[key]) < elements:
            more = max(elements, SUMS)
            if not capturing and key in kept:
                kept[key].record_stream(stream)  # whose launches may still be adding
            kept[key] = torch.zeros(more, dtype=torch.int32, device=device) if capturing else _lasting_zeros(device, more)
        return kept[key][:elements]


def _lasting_zeros(device: torch.device, elements: int) -> Tensor:
    """Zeros that stay, made by another thread: what this one allocates in front of a capture belongs to the graph."""

    def make() -> Tensor:
        zeros = torch.zeros(elements, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return zeros

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


@triton.jit
def store_part(part_ptr, counter_ptr, acc, tile, tiles, split, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write this program's sum; return how many programs of the tile were done before."""
    inside = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(part_ptr + (split * tiles + tile).to(tl.int64) * (ROWS * COLS) + inside, acc, cache_modifier=".cg")
    # All threads' stores come before the barrier, the barrier before the one releasing atomic.
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")


@triton.jit
def add_parts(part_ptr, counter_ptr, tile, tiles, splits, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add the parts of a tile and leave its counter at zero."""
    inside = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    acc = tl.load(part_ptr + tile.to(tl.int64) * (ROWS * COLS) + inside, cache_modifier=".cg")
    for split in range(1, splits):
        acc += tl.load(part_ptr + (split * tiles + tile).to(tl.int64) * (ROWS * COLS) + inside, cache_modifier=".cg")
    tl.store(counter_ptr + tile, 0)
    return acc
