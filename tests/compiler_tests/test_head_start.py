"""What was launched ahead of a call serves it if the guess was right, and changes nothing if it was wrong.

The recorder here needs no GPU: its recording runs its part again on the memory of the first run, as a CUDA graph would.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from mmqc.compiler.cuda_recorder import Replay
from mmqc.compiler.head_start import KEPT, TRIES, HeadStart, Memory
from mmqc.compiler.recorded_sizes import RecordedSizes
from mmqc.compiler.regions import Halves


class Recorder:
    """Records by running again; says in ``log`` what it did."""

    kind = "cpu"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.recorded: list[bool] = []
        self.waits = True

    def usable(self) -> bool:
        return True

    def timed(self, run: Callable[[], Any], short: float = 0.0) -> tuple[Any, Callable[[], bool | None]]:
        return run(), lambda: self.waits or short > 0

    def record(self, run: Callable[[], Any], beside: bool = False) -> tuple[Any, Replay]:
        self.recorded.append(beside)
        outputs = run()
        for output in outputs:
            output.fill_(torch.nan)  # nothing is computed in a capture

        def replay() -> None:
            for kept, new in zip(outputs, run(), strict=True):
                kept.copy_(new)

        return outputs, replay

    def beside(self, run: Callable[[], Any]) -> None:
        self.log.append("beside")
        run()

    def joined(self) -> None:
        self.log.append("joined")


class Model:
    """A tower of its weight and the images, and layers that need the positions."""

    def __init__(self, *, writes: bool = False) -> None:
        self.weight, self.cache, self.towers = torch.arange(1.0, 13).view(3, 4), torch.zeros(8, 4), 0
        self.writes, self.device, self.handed = writes, Recorder(), torch.empty(0)
        self.call = RecordedSizes(self.graph, 4, self.device, self.halves)
        self.ahead = HeadStart()

    def tower(self, weight: Tensor, x: Tensor) -> Tensor:
        self.towers += 1
        if self.writes:
            weight.add_(0)
        return x @ weight

    def graph(self, weight: Tensor, x: Tensor, places: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return self.tail(self.tower(weight, x), weight, x, places, cache)

    def tail(self, seen: Tensor, weight: Tensor, x: Tensor, places: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        del weight, x
        cache[: len(seen)] = seen
        return (seen * places[:, None],)

    def halves(self, late: set[int]) -> Halves | None:
        assert {2, 3} <= late  # nobody was given the positions, and the cache is written to
        return None if 1 in late else Halves(lambda weight, x, *_: (self.tower(weight, x),), self.tail, {0, 1})

    def generate(
        self,
        x: Tensor,
        places: Tensor,
        between: Callable[[], object] = lambda: None,
        copied: bool = False,
        copy: Callable[[Tensor], Tensor] = torch.clone,
    ) -> Tensor:
        """As compiled_loop does."""
        cache = SimpleNamespace(layers=[SimpleNamespace(keys=self.cache)])
        given = {"input_ids": torch.tensor([[1, 2]]), "pixel_values": x, "other": "no tensor"}
        with torch.no_grad(), self.ahead.call(given):
            self.ahead.cache = cache
            between()
            return self.call(self.weight, copy(x) if copied else x, places.clone(), self.cache)[0]

    def right(self, x: Tensor, places: Tensor) -> Tensor:
        return (x @ self.weight) * places[:, None]


def calls(model: Model, count: int, rows: int = 2, **how: Any) -> None:
    for i in range(count):
        x, places = torch.randn(rows, 3), torch.arange(rows) + float(i)
        assert torch.equal(model.generate(x, places, **how), model.right(x, places))


@pytest.mark.parametrize("copied", [False, True])
def test_head__runs_before_the_call_and_once(copied: bool) -> None:
    model = Model()
    calls(model, 8, copied=copied)
    started = model.device.log.count("beside")
    assert started >= 4
    assert model.ahead.right == started
    assert model.device.log == ["beside", "joined"] * started
    assert model.device.recorded == [True, False]
    before = model.towers
    calls(model, 1, copied=copied)
    assert model.towers == before + 1  # not once more in the call


def test_head__of_a_copy_that_comes_to_lie_where_the_last_one_did() -> None:
    """Each is a tensor of its own, gone with its call; the memory is the same."""
    model, memory = Model(), numpy.empty((2, 3), numpy.float32)
    calls(model, 8, copied=True, copy=lambda x: torch.from_numpy(memory).copy_(x))
    assert model.ahead.right >= 4


def test_head__is_worth_a_recording_where_the_device_does_not_wait_for_launches() -> None:
    model = Model()
    model.device.waits = False
    calls(model, 8)
    assert model.ahead.right >= 4


def test_head__sizes_in_any_order() -> None:
    model = Model()
    for rows in (2, 3, 2, 2, 3, 3, 2, 3, 2, 3, 4, 2, 3):
        calls(model, 1, rows)
    assert model.ahead.right >= 4


def test_head__of_an_input_that_is_written_to_meanwhile_runs_again() -> None:
    model = Model()
    calls(model, 6)
    right, x, places = model.ahead.right, torch.randn(2, 3), torch.ones(2)
    got = model.generate(x, places, lambda: x.mul_(3))
    assert torch.equal(got, model.right(x, places))
    assert model.ahead.right == right
    assert model.device.log[-2:] == ["beside", "joined"]


def test_head__of_a_weight_that_is_written_to_meanwhile_runs_again() -> None:
    model = Model()
    calls(model, 6)
    right, x, places = model.ahead.right, torch.randn(2, 3), torch.ones(2)
    got = model.generate(x, places, lambda: model.weight.add_(1))
    assert torch.equal(got, model.right(x, places))
    assert model.ahead.right == right


def test_head__of_a_weight_that_was_replaced_runs_again() -> None:
    model = Model()
    calls(model, 6)
    right, model.weight = model.ahead.right, model.weight * 2
    calls(model, 1)
    assert model.ahead.right == right
    calls(model, 8)
    assert model.ahead.right > right  # recorded anew


def test_memory__is_gone_with_its_storage() -> None:
    weight = torch.zeros(3)
    view, memory = weight[1:], Memory.of([1], [None, weight])
    del weight
    assert memory.alive()
    del view
    gc.collect()
    assert not memory.alive()


def test_head__that_writes_to_its_weights_is_none() -> None:
    model = Model(writes=True)
    calls(model, 8)
    assert model.call.replays >= 4
    assert not model.device.log


def test_head__that_is_always_wrong_is_not_started_for_ever() -> None:
    model = Model()
    calls(model, 4)
    for _ in range(12):
        x, places = torch.randn(2, 3), torch.ones(2)
        got = model.generate(x, places, lambda x=x: x.mul_(2))
        assert torch.equal(got, model.right(x, places))
    assert model.device.log.count("beside") <= TRIES + 2
    assert not model.ahead.known


def test_head__of_what_is_too_large_to_compare_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr("mmqc.compiler.recorded_sizes.COMPARED", 0)
    monkeypatch.setattr("mmqc.compiler.recorded_sizes.handed_over", lambda: {id(model.handed)})
    model.handed = torch.ones(2, 1)
    model.call = RecordedSizes(
        lambda weight, x, place, places, cache: model.graph(weight, x * place, places, cache), 4, model.device,
        lambda late: Halves(lambda *_: (), lambda *_: (), {0, 1, 2}),
    )  # fmt: skip
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=model.cache)])
    for _ in range(6):
        x = torch.randn(2, 3)
        with torch.no_grad(), model.ahead.call({"pixel_values": x}):
            model.ahead.cache = cache
            got = model.call(model.weight, x, model.handed, torch.ones(2), model.cache)[0]
        assert torch.equal(got, x @ model.weight)
    assert model.call.replays
    assert not model.device.log


def test_head__of_a_recording_that_was_forgotten_is_started_once_more_at_most() -> None:
    model = Model()
    model.call.limit = 1
    calls(model, 6)
    calls(model, 6, 3)  # whose recording takes the place of the other
    started, right = model.device.log.count("beside"), model.ahead.right
    calls(model, 2)
    assert model.device.log.count("beside") == started + 1
    assert model.ahead.right == right
    assert not model.ahead.started


def test_recorded__an_input_of_the_loop_that_is_written_to_is_written_to() -> None:
    """The same tensor in every call: it stays where it is, but is copied where the loop was given it."""
    device, ahead, x = Recorder(), HeadStart(), torch.zeros(2)
    call = RecordedSizes(lambda x: (x.add_(1).clone(),), 4, device)
    for i in range(6):
        with torch.no_grad(), ahead.call({"x": x}):
            assert torch.equal(call(x)[0], torch.full((2,), i + 1.0))
        assert torch.equal(x, torch.full((2,), i + 1.0))


def test_recorded__a_view_of_an_input_of_the_loop_is_a_copy() -> None:
    device, ahead, x = Recorder(), HeadStart(), torch.zeros(2)
    device.record = lambda run, beside=False: (run(), lambda: None)  # type: ignore[method-assign]  (a view needs no replay)
    call, results = RecordedSizes(lambda x: (x[:1],), 4, device), []
    for i in range(6):
        x.fill_(i)
        with torch.no_grad(), ahead.call({"x": x}):
            results.append((call(x)[0].clone(), call(x)[0]))
    assert call.replays
    assert [float(copied) for copied, _ in results] == [0, 1, 2, 3, 4, 5]
    assert [float(kept) for _, kept in results[-2:]] == [4, 5], "the next replay does not write to it"


def test_head__a_call_that_fails_leaves_nothing_running() -> None:
    model = Model()
    calls(model, 6)

    def fails() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        model.generate(torch.randn(2, 3), torch.ones(2), fails)
    assert model.device.log[-2:] == ["beside", "joined"]
    assert model.ahead.started is None
    calls(model, 3)


def test_head__is_none_without_the_loop_or_of_inference_tensors() -> None:
    model = Model()
    x, places = torch.randn(2, 3), torch.ones(2)
    with torch.no_grad():
        for _ in range(6):
            assert torch.equal(model.call(model.weight, x, places.clone(), model.cache)[0], model.right(x, places))
    assert model.call.replays
    model = Model()
    with torch.inference_mode():
        x = torch.randn(2, 3)
    for _ in range(6):
        assert torch.equal(model.generate(x, places), model.right(x, places))
    assert not model.device.log


def test_kinds__are_told_apart_by_small_numbers_and_the_oldest_is_forgotten() -> None:
    ahead = HeadStart()
    kinds = []
    for grid in ([[1, 8, 4]], [[1, 4, 8]], [[1, 8, 4]]):
        with ahead.call({"input_ids": torch.zeros(1, 100), "grid": torch.tensor(grid)}):
            kinds.append(ahead.kind)
    assert kinds[0] == kinds[2] != kinds[1]
    head: Any = SimpleNamespace(guessed=lambda args: {}, start=lambda given, guessed: False, wrong=0)
    for i in range(KEPT + 3):
        with ahead.call({"input_ids": torch.tensor([i])}):
            ahead.remember(head, [], right=False)
    assert len(ahead.known) == KEPT


def test_guesses__are_each_kinds_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of as many patches, 8 x 4 and 4 x 8, share a recording whose tower gets other positions from the front."""
    model = Model()
    positions: list[Tensor] = []
    monkeypatch.setattr("mmqc.compiler.recorded_sizes.handed_over", lambda: {id(p) for p in positions})
    model.call = RecordedSizes(
        lambda weight, x, place, places, cache: model.graph(weight, x * place, places, cache), 4, model.device,
        lambda late: Halves(
            lambda weight, x, place, *_: (model.tower(weight, x * place),),
            lambda seen, weight, x, place, places, cache: model.tail(seen, weight, x, places, cache),
            {0, 1, 2},
        ) if late == {3, 4} else None,
    )  # fmt: skip

    def generate(x: Tensor, grid: tuple[int, int]) -> Tensor:
        cache = SimpleNamespace(layers=[SimpleNamespace(keys=model.cache)])
        with torch.no_grad(), model.ahead.call({"pixel_values": x, "grid": torch.tensor([grid])}):
            model.ahead.cache = cache
            positions[:] = [torch.full((2, 1), float(grid[0]))]
            return model.call(model.weight, x, positions[0], torch.ones(2), model.cache)[0]

    right = []
    for i in range(12):
        grid = ((8, 4), (4, 8))[i % 2]
        x = torch.randn(2, 3)
        assert torch.equal(generate(x, grid), (x * grid[0]) @ model.weight)
        right.append(model.ahead.right)
    assert right[-1] - right[6] == 5, "every call's guess, not that of the last call of the other kind"
