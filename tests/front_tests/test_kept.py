"""What one call computed in front serves the next, only where it is the same."""

import copy
from typing import Any

import pytest
import torch
from models import IMAGE, MERGE, PATCH, text_with_images, tiny_qwen2_vl
from tolerance import assert_close
from torch import Tensor

from mmqc.front import front as fronts
from mmqc.front.front import attached

pytestmark = pytest.mark.usefixtures("without_inductor")


def batch_of(*grids: tuple[int, int, int]) -> dict[str, Tensor]:
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * PATCH * PATCH, generator=torch.Generator().manual_seed(1))
    return {**text_with_images([int(g.prod()) // MERGE**2 for g in grid]), "pixel_values": pixels, "image_grid_thw": grid}


@torch.no_grad()
def test_kept__computed_again_only_for_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    eager = copy.deepcopy(model)  # the hooks are in front of every call of the compiled one
    computed: list[Any] = []
    original = fronts.compute
    monkeypatch.setattr(fronts, "compute", lambda *args: (computed.append(args), original(*args)))
    compiled = torch.compile(model, backend="mmqc")
    small, large = batch_of((1, 4, 4)), batch_of((1, 8, 4))
    assert small["input_ids"].eq(IMAGE).any()
    seen = []
    for batch in (small, small, dict(small), large, large, small):
        assert_close(compiled(**batch).logits, eager(**batch).logits)
        seen.append(len(computed))
    first, *rest = (count - seen[0] for count in seen)
    assert (first, *rest) == (0, 0, 0, 1, 1, 2)
    deltas = model.model.rope_deltas  # what a call was given is its own
    deltas.add_(1000)
    assert_close(compiled(**small).logits, eager(**small).logits)
    assert len(computed) == seen[-1]


@pytest.mark.slow
@torch.inference_mode()
def test_kept__inference_tensors_are_not() -> None:
    model, _ = tiny_qwen2_vl(depth=1, layers=1)
    compiled = torch.compile(model, backend="mmqc")
    batch = batch_of((1, 4, 4))
    compiled(**batch)
    front = attached(model)
    assert front is not None
    assert all(k.handed is None for k in front.kept.values())
