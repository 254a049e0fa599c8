"""The search for garbage is off in the block, and afterwards as it was before."""

import gc

import pytest

from mmqc.graph.collections_off import without_collections


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
