"""Sizes that come again are replayed from recordings, with the results and the writes of a call.

The recorder here needs no GPU: its recording runs the graph again on the memory of the first run, as a CUDA graph would.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from mmqc.compiler.cuda_recorder import Replay
from mmqc.compiler.recorded_sizes import RecordedSizes, recorded

WEIGHT = torch.nn.Parameter(torch.arange(12.0).view(3, 4), requires_grad=False)


class Recorder:
    """Records by running again; ``wrote`` undoes what recording must not have done."""

    kind = "cpu"

    def __init__(self, wrote: Sequence[Tensor] = (), *, waits: bool = True, fails: str = "") -> None:
        self.wrote, self.waits, self.fails = wrote, waits, fails
        self.recorded = 0

    def usable(self) -> bool:
        return True

    def timed(self, run: Callable[[], Any], short: float = 0.0) -> tuple[Any, Callable[[], bool | None]]:
        return run(), lambda: self.waits

    def record(self, run: Callable[[], Any], beside: bool = False) -> tuple[Any, Replay]:
        if self.fails:
            raise RuntimeError(f"{self.fails}\nand more lines")
        self.recorded += 1
        before = [t.clone() for t in self.wrote]
        outputs = run()
        for tensor, value in zip(self.wrote, before, strict=True):
            tensor.copy_(value)
        for output in outputs:
            if isinstance(output, Tensor) and all(output is not t for t in self.wrote):
                output.fill_(torch.nan)  # nothing is computed in a capture

        def replay() -> None:
            for kept, new in zip(outputs, run(), strict=True):
                if isinstance(kept, Tensor):
                    kept.copy_(new)

        return outputs, replay


def graph(weight: Tensor, cache: Tensor, x: Tensor, n: int) -> tuple[Any, ...]:
    """Writes rows to a cache; gives a tensor, the cache and a number."""
    cache[: len(x)] = cache[: len(x)] + x
    return x.t().contiguous() @ cache[: len(x)] @ weight, cache, n


def cache_of(rows: int = 8) -> Tensor:
    made = torch.zeros(rows, 3)
    torch._dynamo.mark_static_address(made)
    return made


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def same_calls(sizes: Sequence[int], caches: Sequence[tuple[Tensor, Tensor]], call: Any) -> None:
    """Both graphs on the same fresh inputs, on caches in turn."""
    for i, n in enumerate(sizes):
        mine, theirs = caches[i % len(caches)]
        x = torch.randn(n, 3)
        kept, version = x.clone(), mine._version
        got, back, number = call(WEIGHT, mine, x, n)
        want, _, _ = graph(WEIGHT, theirs, x, n)
        assert torch.equal(got, want)
        assert torch.equal(mine, theirs)
        assert torch.equal(x, kept)
        assert back is mine
        assert number == n
        assert mine._version > version


def test_recorded__calls_in_any_order_of_sizes_give_what_the_graph_gives() -> None:
    draw = random.Random(0)
    mine = cache_of()
    recorder = Recorder([mine])
    call = RecordedSizes(graph, 4, recorder)
    same_calls([draw.randint(1, 4) for _ in range(60)], [(mine, mine.clone())], call)
    assert call.moving == {2}
    assert recorder.recorded == 4
    assert call.replays > 40
    assert not call.refusals()


def test_recorded__results_are_not_written_to_by_the_next_replay() -> None:
    cache = cache_of()
    call = RecordedSizes(graph, 4, Recorder([cache]))
    results = [call(WEIGHT, cache, torch.full((2, 3), float(i)), 2)[0] for i in range(8)]
    assert call.replays > 3
    assert len({float(r.sum()) for r in results}) == 8


def test_recorded__the_last_sizes_used_are_kept() -> None:
    mine = cache_of()
    recorder = Recorder([mine])
    call = RecordedSizes(graph, 1, recorder)
    same_calls([2] * 6 + [3] * 4, [(mine, mine.clone())], call)
    assert recorder.recorded == 2
    same_calls([2] * 4, [(mine, mine.clone())], call)
    assert recorder.recorded == 3  # forgotten when the other came


def test_recorded__another_cache_is_another_size() -> None:
    a, b = cache_of(), cache_of()
    recorder = Recorder([a, b])
    call = RecordedSizes(graph, 4, recorder)
    same_calls([2] * 16, [(a, a.clone()), (b, b.clone())], call)
    assert call.moving == {2}
    assert recorder.recorded == 2
    assert call.replays > 8


@pytest.mark.parametrize(
    ("recorder", "why"),
    [
        (Recorder(waits=False), ["the device takes longer than its launches"]),
        (Recorder(fails="operation not permitted when stream is capturing"), ["operation not permitted when stream is capturing"]),
    ],
    ids=["device bound", "fails"],
)
def test_recorded__what_is_not_recorded_runs(recorder: Recorder, why: list[str]) -> None:
    mine = cache_of()
    call = RecordedSizes(graph, 4, recorder)
    same_calls([2] * 6, [(mine, mine.clone())], call)
    assert not call.replays
    assert call.refusals() == why


def test_recorded__a_device_that_took_longer_is_asked_again() -> None:
    mine, recorder = cache_of(), Recorder(waits=False)
    recorder.wrote = [mine]
    call = RecordedSizes(graph, 4, recorder)
    same_calls([2] * 6, [(mine, mine.clone())], call)
    assert call.refusals() == ["the device takes longer than its launches"]
    recorder.waits = True  # nothing else runs on it now
    same_calls([2] * 20, [(mine, mine.clone())], call)
    assert recorder.recorded == 1
    assert call.replays > 5
    assert not call.refusals()


def test_recorded__an_input_that_is_written_to_is_refused() -> None:
    call = RecordedSizes(lambda x: (x.add_(1),), 4, Recorder())
    for i in range(6):
        x = torch.full((3,), float(i))
        (y,) = call(x)
        assert torch.equal(x, torch.full((3,), i + 1.0))
        assert y is x
    assert not call.replays
    assert call.refusals() == ["it writes to an input that is another tensor in every call"]


def test_recorded__an_input_in_the_cache_itself_is_not_copied_away() -> None:
    mine = cache_of()
    theirs = mine.clone()
    call = RecordedSizes(graph, 4, Recorder([mine]))
    same_calls([2] * 6, [(mine, theirs)], call)
    replays = call.replays
    got, want = call(WEIGHT, mine, mine[1:3], 2)[0], graph(WEIGHT, theirs, theirs[1:3], 2)[0]
    assert replays
    assert call.replays == replays
    assert torch.equal(got, want)
    assert torch.equal(mine, theirs)


def test_recorded__expanded_inputs_keep_their_strides() -> None:
    strides = []

    def strided(x: Tensor) -> tuple[Tensor]:
        strides.append(x.stride())
        return (x * 2,)

    call = RecordedSizes(strided, 4, Recorder())
    for i in range(6):
        x = torch.full((3, 1, 2), float(i)).expand(3, 4, 2)
        assert torch.equal(call(x)[0], x * 2)
    assert call.replays
    assert set(strides) == {(2, 0, 1)}


def test_recorded__values_elsewhere_are_part_of_the_size_if_they_are_numbers() -> None:
    recorder = Recorder()
    recorder.kind = "meta"  # so that tensors here are on another device
    call = RecordedSizes(lambda x: (x + 1,), 4, recorder)
    assert [float(call(torch.tensor(float(i % 2)))[0]) for i in range(12)] == [1.0, 2.0] * 6
    call = RecordedSizes(lambda x: (x + 1,), 4, recorder)
    assert [call(torch.tensor([i]))[0].item() for i in range(5)] == [1, 2, 3, 4, 5]
    assert not call.replays
    assert call.refusals() == ["an input is neither a number nor a plain tensor of the device"]


def test_recorded__not_under_autograd_nor_by_two_threads() -> None:
    cache = cache_of()
    call = RecordedSizes(graph, 4, Recorder([cache]))
    for grad in (True, True, True, True):
        with torch.enable_grad() if grad else nullcontext():
            call(WEIGHT, cache, torch.ones(2, 3), 2)
    assert not call.replays
    assert not call.moving
    inside, done = threading.Event(), threading.Event()

    def waits(x: Tensor) -> tuple[Tensor]:
        if x.numel() == 1:
            inside.set()
            assert done.wait(10)
        return (x + 1,)

    call = RecordedSizes(waits, 4, Recorder())

    def first() -> None:
        with torch.no_grad():
            call(torch.zeros(1))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    results = [call(torch.full((2,), float(i)))[0] for i in range(5)]
    done.set()
    thread.join()
    assert not call.replays
    assert [float(r[0]) for r in results] == [1, 2, 3, 4, 5]


def test_recorded__a_graph_without_a_gpu_is_left_alone() -> None:
    assert recorded(graph, 4, [WEIGHT]) is graph
