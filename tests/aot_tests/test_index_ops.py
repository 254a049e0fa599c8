"""Every index function against the code of transformers that it stands for, on drawn grids and rows of tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import vision_utils
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from mmqc.aot import index_ops

quick = settings(max_examples=40, derandomize=True)


@st.composite
def grids(draw: Any, merge: int, frames: int = 3) -> Tensor:
    side = st.integers(1, 6).map(lambda n: n * merge)
    rows = st.lists(st.tuples(st.integers(1, frames), side, side), min_size=1, max_size=4)
    return torch.tensor(draw(rows))


def patches(grid: Tensor) -> int:
    return int(grid.prod(-1).sum())


merges = st.integers(1, 3)
cases = merges.flatmap(lambda m: st.tuples(grids(m), st.just(m)))


@quick
@given(cases, st.booleans())
def test_position_ids(case: tuple[Tensor, int], temporal: bool) -> None:
    grid, merge = case
    expected = vision_utils.get_vision_position_ids(grid, merge, include_temporal=temporal)
    assert torch.equal(index_ops.position_ids(grid, patches(grid), merge, temporal), expected)


@quick
@given(cases, st.booleans())
def test_segment_ends__are_padded_with_the_last(case: tuple[Tensor, int], by_frame: bool) -> None:
    grid, _ = case
    expected = vision_utils.get_vision_cu_seqlens(grid, merge_temporal=not by_frame)
    ends, bound = index_ops.lengths(grid, patches(grid), by_frame)
    assert ends.shape == (patches(grid) + 1,)
    assert torch.equal(ends[: len(expected)].int(), expected)
    assert (ends[len(expected) :] == patches(grid)).all()
    assert int(expected.diff().max()) <= bound


@quick
@given(cases, st.integers(1, 4))
def test_window_order(case: tuple[Tensor, int], window: int) -> None:
    grid, merge = case
    patch = 7
    order, ends = vision_utils.get_vision_window_index(grid, merge, window * merge * patch, patch)
    got, got_ends = index_ops.window_order(grid, patches(grid), merge, window)
    assert torch.equal(got, order)
    assert torch.equal(got_ends.unique_consecutive().int(), ends)
    assert torch.equal(got_ends[: len(ends)].int(), ends)


@quick
@given(cases, st.integers(2, 9), st.sampled_from(("bilinear", "bicubic")), st.booleans(), st.sampled_from(("border", "zeros")))
def test_interpolation(case: tuple[Tensor, int], side: int, mode: str, align: bool, padding: str) -> None:
    grid, merge = case
    expected = vision_utils.get_vision_interpolation_indices_and_weights(grid, side, mode, align, merge, padding)
    got = index_ops.interpolation(grid, patches(grid), side, merge, mode, align, padding)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# --- positions of tokens ----------------------------------------------------------------------------------------------

Row = list[tuple[int, tuple[int, int, int] | int]]


@st.composite
def rows(draw: Any, merge: int, kinds: tuple[int, ...]) -> list[Row]:
    """Rows of (0, words) and (kind, grid): text stands around every image."""
    side = st.integers(1, 5).map(lambda n: n * merge)
    words = st.tuples(st.just(0), st.integers(1, 4))
    image = st.tuples(st.sampled_from(kinds), st.tuples(st.integers(1, 3), side, side))
    found: list[Row] = []
    for _ in range(draw(st.integers(1, 3))):
        row = [draw(words)]
        for _ in range(draw(st.integers(0, 3))):
            row += [draw(image), draw(words)]
        found.append(row)
    for kind in kinds:
        found[0] += [(kind, draw(st.tuples(st.integers(1, 3), side, side))), draw(words)]
    return found


def tokens(drawn: list[Row], merge: int, left: bool, apart: int = 0) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """(types [B, L], mask [B, L], grids by type); frames of type ``apart`` have a word in front of each."""
    types: list[list[int]] = []
    found: dict[int, list[Any]] = {}
    for row in drawn:
        types.append([])
        for kind, what in row:
            if isinstance(what, int):
                types[-1] += [0] * what
                continue
            t, h, w = what
            found.setdefault(kind, []).append(what)
            frame = [kind] * (h * w // merge**2)
            types[-1] += ([0] * (kind == apart) + frame) * t
    length = max(map(len, types))
    pads = [[0] * (length - len(t)) for t in types]
    of = lambda parts: torch.tensor([[*p, *t] if left else [*t, *p] for p, t in parts])  # noqa: E731
    mask = of([(p, [1] * len(t)) for p, t in zip(pads, types, strict=True)])
    return of(list(zip(pads, types, strict=True))), mask, {k: torch.tensor(v) for k, v in found.items()}


def expected_positions(model: Any, types: Tensor, mask: Tensor, grids: dict[int, Tensor], merge: int) -> tuple[Tensor, Tensor]:
    """What a model's own method computes."""
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge))
    owner = SimpleNamespace(config=config)
    owner.get_vision_position_ids = lambda *a, **k: model.get_vision_position_ids(owner, *a, **k)
    return model.get_rope_index(owner, types, types, image_grid_thw=grids.get(1), video_grid_thw=grids.get(2), attention_mask=mask)


@quick
@given(merges.flatmap(lambda m: st.tuples(rows(m, (1, 2)), st.just(m))), st.booleans())
def test_token_positions(case: tuple[list[Row], int], left: bool) -> None:
    drawn, merge = case
    types, mask, grids = tokens(drawn, merge, left)
    expected = expected_positions(Qwen2VLModel, types, mask, grids, merge)
    got = index_ops.token_positions(types, mask, grids, merge, by_frame=False, interval=1)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    if mask.all():
        again = index_ops.token_positions(types, None, grids, merge, by_frame=False, interval=1)
        assert torch.equal(again[0], got[0])


@quick
@given(merges.flatmap(lambda m: st.tuples(rows(m, (2,)), st.just(m))), st.booleans())
def test_token_positions__frame_by_frame(case: tuple[list[Row], int], left: bool) -> None:
    drawn, merge = case
    types, mask, grids = tokens(drawn, merge, left, apart=2)
    expected = expected_positions(Qwen3VLModel, types, mask, grids, merge)
    got = index_ops.token_positions(types, mask, grids, merge, by_frame=True, interval=1)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("row", index_ops.CANDIDATES, ids=lambda c: c.function.__name__)
def test_candidates__read_no_value(row: index_ops.Candidate) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    numbers = {name: values[-1] if values else 4 for name, values in row.numbers.items()}
    with FakeTensorMode():
        grid = torch.ones(2, 3, dtype=torch.long)
        types = torch.ones(2, 9, dtype=torch.int)
        result = row.function(types, types, {1: grid}, **numbers) if row.of_tokens else row.function(grid, 64, **numbers)
    assert isinstance(result, (Tensor, tuple))
