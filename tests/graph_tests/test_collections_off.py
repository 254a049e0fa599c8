"""The search for garbage is off in the block, and afterwards as it was before; what is old waits for the next full one."""

import gc
import weakref

import pytest
from often import often

from mmqc.graph import collections_off
from mmqc.graph.collections_off import count_as_old, without_collections


@pytest.mark.parametrize("on", [True, False])
def test_without_collections__leaves_it_as_it_was(on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with pytest.raises(ZeroDivisionError), without_collections():
            1 // gc.isenabled()  # off: a division by zero, which leaves the block
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("frozen", often((True, False), True), ids=["objects of the caller", "none"])
def test_count_as_old__the_next_full_search_finds_what_was_made(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collections_off, "_callers_own", False)

    class Cycle:
        pass

    before = gc.get_freeze_count()
    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        gc.collect()
        one = Cycle()
        one.me = one  # type: ignore[attr-defined]
        gone = weakref.ref(one)
        del one
        count_as_old()
        gc.collect(1)
        assert (gone() is None) is frozen, "the young are looked through alone"
        gc.collect()
        assert gone() is None
        assert bool(gc.get_freeze_count()) is frozen
    finally:
        (gc.freeze if before else gc.unfreeze)()
