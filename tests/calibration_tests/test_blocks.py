"""How a model is taken apart: where segments begin and end, what each block takes, and which lists are left whole."""

from typing import Any

import pytest
import torch
from blocks import ids, shared
from streams import Between, Masked
from torch import nn

from mmqc.calibration.blocks import (
    KEPT,
    PLAIN,
    STREAM,
    Layout,
    NotStreamableError,
    Outside,
    Segment,
    block_lists,
    leaves_of,
    survey,
)


def linears(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]


@torch.no_grad()
def surveyed(model: nn.Module, *batches: Any) -> Layout:
    return survey(model, linears(model), [lambda b=b: model(**b) for b in batches])


@pytest.mark.parametrize(("how", "segments"), [("none", [3]), ("outside", [2, 1]), ("in place", [2, 1])])
def test_survey__a_segment_ends_where_code_in_between_changes_the_stream(how: str, segments: list[int]) -> None:
    model = Between(how)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        layout = survey(model, names, [lambda: model(**ids())])
    assert [len(u.blocks) for u in layout.units if isinstance(u, Segment)] == segments
    assert layout.units[-1] == Outside(("body.head",), len(segments))
    assert layout.refused == {}


def test_survey__sources_are_the_stream_what_is_kept_and_plain_values() -> None:
    model = Masked()
    (segment,) = surveyed(model, ids()).units
    assert isinstance(segment, Segment)
    kinds = [[s.kind for s in block.sources] for block in segment.blocks]
    assert kinds[0] == [KEPT, KEPT, KEPT, KEPT, PLAIN]  # the stream's beginning, one mask twice, the length, the flag
    assert kinds[1] == [STREAM, KEPT, KEPT, KEPT, PLAIN]
    assert [len(block.meets) for block in segment.blocks] == [3, 1, 0, 0]
    assert segment.last_use() == {0: 0, 1: 3, 2: 3, 3: 3}
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_survey__leaves_whole_what_it_cannot_call_again() -> None:
    twice = surveyed(shared(), ids())
    assert list(twice.refused.values()) == ["its blocks are called more than once in one forward"]
    assert all(isinstance(unit, Outside) for unit in twice.units)
    model = Between("none")
    unreached = survey(model, linears(model), [lambda: None])
    assert unreached.refused == {"body.blocks": "no recorded batch reached it"}
    with pytest.raises(NotStreamableError, match="take a set"):
        leaves_of("here", ({1},), {})


def test_block_lists__outermost_lists_with_linears_in_their_children() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Sequential(nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])) for _ in range(2))
    model.heads = nn.ModuleList([nn.Linear(2, 2)])
    assert block_lists(model, linears(model)) == {"layers": ["layers.0", "layers.1"]}
    assert block_lists(model, ["layers.1.0.0.0"]) == {"layers": ["layers.0", "layers.1"]}


def test_until__is_the_first_block_behind_all_of_them() -> None:
    layout = surveyed(Between("outside"), ids())
    first, second = (u.blocks[0].name for u in layout.units if isinstance(u, Segment))
    assert (first, second) == ("body.blocks.0", "body.blocks.2")
    assert layout.until([Outside(("a",), 0)]) == first
    assert layout.until([Outside(("a",), 0), Outside(("b",), 1)]) == second
    assert layout.until([Outside(("a",), 2)]) == layout.until([Outside(("a",))]) == ""
