"""One process alone gets back what it gives."""

from __future__ import annotations

import torch

from mmqc.distributed.ranks import ALONE


def test_alone__everything_is_ones_own():
    items, x = [1, 2, 3], torch.ones(2)
    assert ALONE.mine(items) is items
    assert ALONE.collected(items) is items
    assert ALONE.shared(lambda: items) is items
    assert ALONE.summed({"x": x})["x"] is x
    assert ALONE.largest({"x": x})["x"] is x
    assert ALONE.owners([1.0, 2.0]) == [0, 0]
    assert ALONE.first
