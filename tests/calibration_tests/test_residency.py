"""One block at a time: what is moved where, without an accelerator."""

from typing import Any

import pytest
import torch
from small_vlm import Small, batches
from torch import nn

from mmqc.calibration import residency
from mmqc.calibration.residency import Left, Residency

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


def test_residency__what_left_is_known_when_it_comes_home(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = Small(), {}

    def move(module: nn.Module, device: torch.device, kept: Any = None) -> dict[int, Any]:
        given[id(module)] = kept
        return {id(module): "as it was"}

    monkeypatch.setattr(residency, "_move", move)
    with Residency(model, BLOCKS, "meta"):
        outer = given.keys() - {id(m) for name in BLOCKS for m in model.get_submodule(name).modules()}
        assert all(kept is None for kept in given.values())
    assert len(outer) > 4
    assert all(given[id(m)] == dict.fromkeys(outer, "as it was") for m in model.modules())


def test_left__tells_other_data_and_keeps_none() -> None:
    weight, home = nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4)
    left = Left.of(weight, home)
    assert left.unchanged(weight)
    assert not left.unchanged(nn.Parameter(weight.data))
    weight.data = weight.data.t()
    assert not left.unchanged(weight), "transposed"
    weight.data = torch.ones(4, 4)
    assert not left.unchanged(weight)
    assert left.memory.expired(), "what was replaced is gone"


@pytest.mark.gpu
def test_residency__what_nothing_changed_is_not_copied_home() -> None:
    model = Small()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    norm, other = model.get_submodule("model.text.norm"), torch.full((model.model.text.norm.weight.numel(),), 2.0)
    with Residency(model, BLOCKS, "cuda") as resident, resident.resident(BLOCKS[1]):
        away = {name for name, p in model.named_parameters() if p.is_cuda}
        assert away == {name for name in before if not name.startswith((BLOCKS[0], BLOCKS[2], BLOCKS[3]))}
        norm.weight.data = other.cuda()
    moved = {name for name, p in model.named_parameters() if p.data_ptr() != before[name]}
    assert moved == {"model.text.norm.weight"}
    assert torch.equal(norm.weight.detach(), other)
