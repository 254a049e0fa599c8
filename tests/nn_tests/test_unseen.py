import pytest
import torch
from blocks import VOCAB, WIDTH, RMSNorm, ids
from float64 import EXACT, output_of, relative_error
from models import randomise
from torch import Tensor, nn

import mmqc
from mmqc.nn.unseen import unseen_modules, unsure_weights


class Routed(nn.Module):
    """A list of linears of which the forward takes those that ``used`` names, in parallel or one after the other."""

    def __init__(self, used: tuple[int, ...], chained: bool = False) -> None:
        super().__init__()
        self.used, self.chained = used, chained
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.norm, self.last = RMSNorm(), RMSNorm()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for i in self.used:
            x = x + self.experts[i](self.norm(x))
        return self.head(self.last(x))


def quantized(used: tuple[int, ...]) -> tuple[nn.Module, mmqc.QuantReport]:
    model = randomise(Routed(used)).double()
    expected = output_of(model, ids())
    report = mmqc.quantize_(model, mmqc.recipes.rotate(), [ids()], progress=False)
    assert relative_error(output_of(model, ids()), expected) < EXACT
    return model, report


def test_unseen__stream_of_an_expert_that_was_not_reached_is_left_alone() -> None:
    before = randomise(Routed((0, 2))).double()
    model, report = quantized((0, 2))
    reasons = {r.fqn: r.reason for r in report.refused}
    assert "no recorded batch reached experts.1" in reasons["experts.0.weight"]
    model.used = before.used = (0, 1, 2, 3)
    assert relative_error(output_of(model, ids()), output_of(before, ids())) < EXACT


def test_unseen__last_of_a_list_refuses_to_run() -> None:
    model, report = quantized((0, 1))
    unreached = {r.fqn for r in report.refused if "no recorded batch" in r.reason}
    assert unreached == {"experts.2", "experts.3"}
    model.used = (0, 1, 2)
    with pytest.raises(RuntimeError, match=r"experts\.2 ran, but no batch .* reached it"):
        output_of(model, ids())


def test_unseen__names() -> None:
    model = Routed((0,))
    assert unseen_modules(model, {"experts.0", "experts.1"}) == ["experts.2", "experts.3"]
    assert unsure_weights(model, {"experts.0", "experts.1"}) == {}
    assert set(unsure_weights(model, {"experts.1"})) == {"experts.1.weight", "experts.1.bias"}
    assert unsure_weights(model, {f"experts.{i}" for i in range(4)}) == {}
    assert unsure_weights(model, {"embed"}) == {}


def test_unseen__a_second_batch_reaches_what_the_first_does_not() -> None:
    class ByLength(Routed):
        def forward(self, input_ids: Tensor) -> Tensor:
            self.used = (0, 1, 2, 3) if input_ids.shape[1] == 3 else (0, 2)
            return super().forward(input_ids)

    model = randomise(ByLength((0,))).double()
    batches = [{"input_ids": torch.arange(n)[None]} for n in (4, 3)]
    expected = [output_of(model, b) for b in batches]
    report = mmqc.quantize_(model, mmqc.recipes.rotate(), batches, progress=False)
    assert not any("no recorded batch" in r.reason for r in report.refused)
    for batch, before in zip(batches, expected, strict=True):
        assert relative_error(output_of(model, batch), before) < EXACT
