"""One block at a time: what is moved where, without an accelerator."""

from typing import Any

import pytest
import torch
from small_vlm import Small, batches
from torch import nn

from mmqc.calibration import residency
from mmqc.calibration.residency import Residency

BLOCKS = ["model.vision.blocks.0", "model.vision.blocks.1", "model.text.blocks.0", "model.text.blocks.1"]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Where each module is, with moving replaced by a note of it."""
    where: dict[int, str] = {}

    def move(module: nn.Module, device: torch.device, kept: Any = None) -> dict[int, Any]:
        where[id(module)] = device.type
        return {}

    monkeypatch.setattr(residency, "_move", move)
    return where


def on_device(model: nn.Module, places: dict[int, str]) -> set[str]:
    return {n for n, m in model.named_modules() if places.get(id(m)) == "meta" and list(m.parameters(recurse=False))}


def test_residency__one_block_and_what_is_in_none(places: dict[int, str]) -> None:
    model, seen = Small(), {}
    with Residency(model, BLOCKS, "meta"):
        outer = on_device(model, places)
        assert outer
        assert not any(name.startswith(tuple(BLOCKS)) for name in outer)
        for name in BLOCKS:
            block = model.get_submodule(name)
            block.register_forward_hook(lambda m, a, o, n=name: seen.update({n: on_device(model, places) - outer}))
        model(**batches()[0])
    assert list(seen) == BLOCKS
    for name, there in seen.items():
        assert all(n.startswith(name) for n in there)
    assert on_device(model, places) == set()


def test_residency__a_resident_block_stays_through_its_forward(places: dict[int, str]) -> None:
    model = Small()
    with Residency(model, BLOCKS, "meta") as resident:
        outer = on_device(model, places)
        with resident.resident(BLOCKS[2]):
            model(**batches()[0])
            assert {n[: len(BLOCKS[2])] for n in on_device(model, places) - outer} == {BLOCKS[2]}
        assert on_device(model, places) == outer


def test_residency__nothing_to_do_where_the_model_is(places: dict[int, str]) -> None:
    model = Small()
    with Residency(model, BLOCKS, "cpu") as resident, resident.resident(BLOCKS[0]):
        batch = resident.batch(batches()[0])
        assert batch["input_ids"] is not None
        model(**batch)
    assert places == {}
