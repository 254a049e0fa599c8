"""What ranks learn of each other: two views of one store, in one process."""

from __future__ import annotations

import time

import pytest

from mmqc.distributed import watch
from mmqc.distributed.watch import RankError, Watch


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "SIGN", 0.05)
    monkeypatch.setattr(watch, "LOOK", 0.01)
    served = watch.serve()
    both = [Watch("localhost", served.port, rank, 2, served if rank == 0 else None) for rank in range(2)]
    yield both
    for one in reversed(both):
        one.leave(failed=False)


def test_leave__rank_0_serves_until_the_others_have_left(pair, monkeypatch):
    monkeypatch.setattr(watch, "SILENCE", 0.2)
    start = time.monotonic()
    pair[0].leave(failed=False)
    assert time.monotonic() - start >= 0.2
    pair[1].leave(failed=False)
    start = time.monotonic()
    pair[0].leave(failed=False)
    assert time.monotonic() - start < 0.2


def test_leave__of_work_that_is_done_needs_no_rank_0(pair, monkeypatch):
    """Nobody would be told by an error, and the model has what it was to have."""

    def gone(*_):
        raise RuntimeError("Connection reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(type(pair[1].store), "add", gone)
        pair[1].leave(failed=False)
    assert pair[1].over.is_set()


def test_look__is_silent_while_all_is_well(pair, monkeypatch):
    monkeypatch.setattr(watch, "SILENCE", 1.0)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert [one.look() for one in pair] == [None, None]
        time.sleep(0.05)


def test_look__raises_the_first_words(pair):
    first, second = pair
    second.tell(ValueError("one\n two"))
    first.tell(ValueError("three"))
    with pytest.raises(RankError, match=r"^rank 1 failed: ValueError: one two; the model is as it was$"):
        first.look()


def test_tell__hands_on_what_was_learned(pair):
    pair[0].tell(RankError("another rank has ended"))
    with pytest.raises(RankError, match=r"^another rank has ended; the model"):
        pair[1].look()


def test_look__notices_silence(pair, monkeypatch):
    monkeypatch.setattr(watch, "SILENCE", 0.3)
    first, second = pair
    first.look()
    second.over.set()
    time.sleep(0.1)  # it may be about to give one
    first.look()
    time.sleep(0.4)
    with pytest.raises(RankError, match=r"^rank 1 has given no sign of life for 0 s"):
        first.look()


def test_lost__prefers_words_to_a_broken_connection(pair):
    with pytest.raises(RankError, match="another rank has ended"):
        pair[0].lost(RuntimeError("Connection closed"))
    pair[1].tell(ValueError("why"))
    with pytest.raises(RankError, match="rank 1 failed: ValueError: why"):
        pair[0].lost(RuntimeError("Connection closed"))
