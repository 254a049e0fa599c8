"""Blocks run one after the other on what the one before returned give what the whole model gives."""

from typing import Any

import pytest
import torch
from blocks import ids
from streams import Between, Masked
from torch import Tensor, nn

from mmqc.calibration.blocks import NotStreamableError, Segment, survey
from mmqc.calibration.spool import Spool
from mmqc.calibration.stream import Feed, capture
from mmqc.nn.modality import ModalityContext

CPU = torch.device("cpu")


def feeds_of(model: nn.Module, *batches: Any, context: ModalityContext | None = None) -> list[Feed]:
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    layout = survey(model, linears, [lambda b=b: model(**b) for b in batches])
    return [Feed(u, context, Spool(), CPU) for u in layout.units if isinstance(u, Segment)]


@torch.no_grad()
def test_feed__computes_what_the_model_computes() -> None:
    model, batches = Masked(), [ids(6, 0), ids(9, 1)]
    (feed,) = feeds_of(model, *batches)
    capture(model, [feed], ((i, lambda b=b: model(**b)) for i, b in enumerate(batches)))
    assert feed.batches == [0, 1]
    assert not any(m._forward_pre_hooks for m in model.modules())
    for number in range(4):
        outputs = {batch: feed.call(model, number, batch) for batch in feed.batches}
        feed.advance(number, {batch: feed.outputs(output) for batch, output in outputs.items()})
    assert all(torch.equal(outputs[i][0], model(**b)) for i, b in enumerate(batches))
    assert feed.kept == {0: {}, 1: {}}, "what no later block reads is dropped"


@torch.no_grad()
@pytest.mark.parametrize(("until", "calls"), [(None, [1, 1, 0]), ("body.blocks.2", [1, 1, 0]), ("", [1, 1, 1])])
def test_capture__stops_a_forward_behind_what_is_awaited(until: str | None, calls: list[int]) -> None:
    model = Between("outside")
    feeds = feeds_of(model, ids())
    model.calls = [0, 0, 0]
    capture(model, feeds, [(5, lambda: model(**ids()))], until)
    assert model.calls == calls
    assert [feed.batches for feed in feeds] == [[5], [5]]


@torch.no_grad()
def test_capture__refuses_a_batch_that_calls_a_block_in_another_way() -> None:
    model = Masked()
    (feed,) = feeds_of(model, ids())
    model.layers[0].register_forward_pre_hook(lambda m, args, kwargs: (args, {**kwargs, "flag": False}), with_kwargs=True)
    with pytest.raises(NotStreamableError, match=r"batch 3 calls layers\.0 with other arguments"):
        capture(model, [feed], [(3, lambda: model(**ids()))])
    assert len(model.layers[0]._forward_pre_hooks) == 1, "the test's own"


@torch.no_grad()
def test_feed__has_the_visual_mask_of_its_batch_during_a_call() -> None:
    model, context, seen = Between("none"), ModalityContext(), []
    (feed,) = feeds_of(model, ids(), context=context)
    masks = [torch.tensor([[True, False]]), None]

    def forward(mask: Tensor | None) -> None:
        context.visual = mask
        model(**ids())

    capture(model, [feed], enumerate([lambda m=m: forward(m) for m in masks]))
    model.body.blocks[0].register_forward_pre_hook(lambda *call: seen.append((context.visual, context.running)))
    for batch in feed.batches:
        feed.call(model, 0, batch)
    assert torch.equal(seen[0][0], masks[0])
    assert seen[1] == (None, True)
    assert (context.visual, context.running) == (None, False)
