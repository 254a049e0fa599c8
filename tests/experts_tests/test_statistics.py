"""What each expert's inputs look like, against the routing computed in plain torch."""

from typing import Any

import pytest
import torch
from mixtures import CHOSEN, EXPERTS, VOCAB, by_hand, mixture, tokens
from tolerance import assert_close

from mmqc.calibration.calibrate import TEXT, VISUAL
from mmqc.config import ActivationSpec, Scheme, WeightSpec
from mmqc.experts.call import Rows
from mmqc.experts.find import find_experts
from mmqc.experts.statistics import ENOUGH_ROWS, Observed, StackStatistics, expert_statistics
from mmqc.graph.record import record
from mmqc.nn.modality import ModalityContext

PERCENTILE = ActivationSpec(observer="percentile", percentile=0.9)


def observed(model: Any, scheme: Scheme, context: ModalityContext | None = None) -> dict[str, StackStatistics]:
    layers, refused = find_experts(model, record(model, tokens()), tokens())
    assert not refused
    watched = [Observed(layer, scheme, "language") for layer in layers]
    return expert_statistics(model, [tokens(), tokens(seed=1)], watched, context, lambda stack, x: x)


@pytest.mark.parametrize("form", ["routed", "batched", "sorted"])
def test_statistics__are_those_of_the_rows_routed_to_each_expert(form: str) -> None:
    model = mixture(form, allowed=4)
    scheme = Scheme(WeightSpec(4, solver="gptq"), PERCENTILE)
    found = observed(model, scheme)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert len(found) == 2
    if form != "routed":
        counts = [seen.rows for seen in found.values()]
        assert torch.equal(counts[0], counts[1])
        assert counts[0][4].tolist() == [0, 0, 0]
        return
    hands = [by_hand(model, tokens()), by_hand(model, tokens(seed=1))]
    for name, which in (("experts.up", 0), ("experts.down", 1)):
        seen = found[name]
        rows = [torch.cat([hand[which][e] for hand in hands]) for e in range(EXPERTS)]
        assert seen.seen().tolist() == [len(x) for x in rows]
        for e, x in enumerate(rows[:4]):
            assert seen.range([e], [0]).low == float(x.float().min())
            assert seen.range([e], [0]).high == float(x.float().max())
            assert_close(seen.hessian[e], x.T @ x, torch.float32)
        assert int(seen.histogram.sum()) == sum(x.numel() for x in rows)
        assert seen.note(True) == "1 of 5 experts saw no token: rounded to nearest, the input scale of all experts"


def test_update__by_modality_leaves_out_rows_that_are_zero() -> None:
    seen = StackStatistics(2, None, True, {TEXT: 1.0, VISUAL: 3.0})
    x = torch.tensor([[1.0, 2.0], [0.0, 0.0], [-4.0, 1.0], [5.0, 5.0]])
    rows = Rows(x, torch.tensor([0, 2, 3], dtype=torch.int32), lambda y: y, None)  # the last row belongs to no expert
    seen.update(x, rows, torch.tensor([0, 0, 1, 2]))
    assert seen.rows.tolist() == [[1, 0, 0], [0, 1, 0]]
    assert seen.ranges() == {TEXT: (1.0, 2.0), VISUAL: (-4.0, 1.0)}
    assert torch.equal(seen.hessian[0], torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double())
    assert torch.equal(seen.hessian[1], 3 * torch.tensor([[16.0, -4.0], [-4.0, 1.0]]).double())


def test_scales__of_experts_with_few_rows_are_those_of_all() -> None:
    seen = StackStatistics(2, None, False)
    x = torch.cat((torch.full((ENOUGH_ROWS, 1), 12.7), torch.full((1, 1), 1.27)))
    offsets = torch.tensor([0, ENOUGH_ROWS, ENOUGH_ROWS + 1], dtype=torch.int32)
    kinds = torch.zeros(len(x), dtype=torch.long)
    seen.update(x, Rows(x, offsets, lambda y: y, None), kinds)
    assert_close(seen.scales(ActivationSpec(), True), torch.tensor([[0.1], [0.1]]))
    for _ in range(ENOUGH_ROWS):
        seen.update(x, Rows(x, offsets, lambda y: y, None), kinds + 1)
    assert_close(seen.scales(ActivationSpec(), True), torch.tensor([[0.1], [0.01]]))
    by_modality = seen.scales(ActivationSpec(per_modality=True), True)
    assert_close(by_modality, torch.tensor([[0.1, 0.1], [0.1, 0.01]]))
    assert StackStatistics(2, None, False).scales(ActivationSpec(), True) is None


def test_modality__is_that_of_the_token_that_a_row_came_from() -> None:
    model, even = mixture(), range(0, VOCAB, 2)
    context = ModalityContext.attach(model, tuple(even))
    found = observed(model, Scheme(WeightSpec(4), PERCENTILE), context)
    ids = torch.cat([tokens()["input_ids"], tokens(seed=1)["input_ids"]])
    visual = CHOSEN * int((ids % 2 == 0).sum())
    expected = [CHOSEN * ids.numel() - visual, visual, 0]
    assert {name: seen.rows.sum(0).tolist() for name, seen in found.items()} == {"experts.up": expected, "experts.down": expected}
