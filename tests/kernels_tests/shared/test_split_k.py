"""Counters of launches: a ring, and another one for what is recorded to run beside other launches."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from mmqc.kernels.shared.split_k import ALIGNED, RING, counters_beside, workspace

CPU = torch.device("cpu")


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
