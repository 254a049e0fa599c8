"""Weights leave their accelerator behind the work, at most so many bytes at a time, and come back to the bit whatever fails."""

import gc
import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from mmqc.quantization import convert, eviction
from mmqc.quantization.convert import Journal
from mmqc.quantization.eviction import Evicted, Eviction

SIZE = 64 * 64 * 4  # bytes of a weight


@pytest.fixture
def accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in host memory leave as those of an accelerator do; no more than two wait."""
    monkeypatch.setattr(convert, "_evictable", lambda tensor: True)
    monkeypatch.setattr(eviction, "UNDER_WAY", 2 * SIZE)


def model_of(linears: int) -> Any:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(linears)))


def edit(model: Any, journal: Journal) -> None:
    """Replace half of the weights, then swap all linears."""
    linears = list(model)
    for number in range(0, len(linears), 2):
        journal.parameter(f"{number}.weight", torch.zeros(64, 64))
    for number in range(len(linears)):
        journal.swap({str(number): nn.Linear(64, 64, bias=False)})


@pytest.mark.parametrize("copied", ["all", "none", "first"])
def test_journal__what_left_is_back_to_the_bit_however_much_was_copied(
    accelerated: None, monkeypatch: pytest.MonkeyPatch, copied: str
) -> None:
    model, count, real = model_of(6), iter(range(100)), Eviction._copied
    linears, before = list(model), [m.weight.detach().clone() for m in model]

    def some(self: Eviction, source: Tensor, host: Tensor, written: Any) -> bool:
        host.fill_(torch.nan)
        return (copied == "all" or (copied == "first" and not next(count))) and real(self, source, host, written)

    monkeypatch.setattr(Eviction, "_copied", some)
    with suppress(KeyboardInterrupt), Journal(model) as journal:
        edit(model, journal)
        raise KeyboardInterrupt
    assert list(model) == linears
    assert all(torch.equal(m.weight, weight) for m, weight in zip(model, before, strict=True))


def test_journal__an_error_of_a_copy_is_raised_by_a_later_edit_and_loses_nothing(
    accelerated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(6)
    before = [m.weight.detach().clone() for m in model]

    def full(self: Eviction, source: Tensor, host: Tensor, written: Any) -> bool:
        raise MemoryError("host memory is full")

    monkeypatch.setattr(Eviction, "_copied", full)
    with pytest.raises(MemoryError, match="host memory is full"), Journal(model) as journal:
        edit(model, journal)
    assert all(torch.equal(m.weight, weight) for m, weight in zip(model, before, strict=True))


def test_journal__no_more_is_under_way_than_allowed_and_what_stays_drops_it(
    accelerated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begun, most, real = model_of(8), threading.Event(), [0], Eviction._copied
    sources = [weakref.ref(m.weight) for m in model]

    def watched(self: Eviction, source: Tensor, host: Tensor, written: Any) -> bool:
        most[0] = max(most[0], sum(size for _, size in self.under_way))
        begun.set()
        return real(self, source, host, written)

    monkeypatch.setattr(Eviction, "_copied", watched)
    with Journal(model) as journal:
        edit(model, journal)
    assert begun.is_set()
    assert 0 < most[0] <= 2 * SIZE
    gc.collect()
    assert not any(source() is not None for source in sources)
    assert not [t for t in threading.enumerate() if t.name.startswith("mmqc eviction") and t.is_alive()]


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [True, False])
def test_journal__weights_of_a_gpu_leave_it_and_come_back_to_the_bit(fails: bool) -> None:
    torch.manual_seed(0)
    gc.collect()
    others = torch.cuda.memory_allocated()  # of tests before this one
    model: Any = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(24))).cuda().half()  # 32 MiB each: one piece
    model[3].weight = nn.Parameter(torch.randn(4096, 8192, device="cuda", dtype=torch.half)[:, ::2])  # in no order of its own
    before, held = [m.weight.detach().cpu() for m in model], torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        with Journal(model) as journal:
            for number in range(len(before)):
                model[number].weight.data.mul_(1)  # the last write before it leaves is on this stream
                journal.swap({str(number): nn.Linear(1, 1)})
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert all(m.weight.is_cuda and torch.equal(m.weight.cpu(), weight) for m, weight in zip(model, before, strict=True))
        return
    assert not fails
    assert torch.cuda.memory_allocated() - others < (held - others) / 8
    assert torch.cuda.max_memory_allocated() < held + eviction.UNDER_WAY


def test_eviction__lets_go_of_a_source_when_its_copy_is_there() -> None:
    evicting, kept = Eviction(), []
    evicting.evict(torch.arange(6.0).view(2, 3).T, kept.append)
    (evicted,) = kept
    assert isinstance(evicted, Evicted)
    evicting.under_way[0][0].result()
    evicting.close()
    assert evicted.source is None
    assert torch.equal(evicted.back(), torch.arange(6.0).view(2, 3).T)


@pytest.mark.parametrize("closed", [False, True])
def test_eviction__copies_by_pieces_until_it_is_closed(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    monkeypatch.setattr(eviction, "PIECE", 1000)
    evicting, stream = Eviction(), cast(Any, SimpleNamespace(synchronize=lambda: None))
    evicting.own.piece, evicting.closed = torch.empty(1000, dtype=torch.uint8), closed
    for source in (torch.randn(37, 41).bfloat16(), torch.randn(()), torch.randint(0, 9, (1001,), dtype=torch.int8)):
        host = torch.zeros_like(source)
        assert evicting._by_pieces(source, host, stream) is not closed
        assert torch.equal(host, source) is not closed
