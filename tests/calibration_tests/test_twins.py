"""What linears outside all blocks are told of the floating-point model: the same batch's calls, in order, and no others'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from mmqc.calibration.calibrate import Observer, Watch
from mmqc.calibration.observe import observe
from mmqc.calibration.spool import Spool
from mmqc.calibration.twins import Twins
from mmqc.distributed.ranks import ALONE


class Twice(nn.Module):
    """Calls its linear once or twice, and writes to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)

    def forward(self, x: Tensor, times: int) -> Tensor:
        y = self.up(x)
        for _ in range(times - 1):
            y = self.up(x.mul_(2))
        return y


def calls(model: Twice, batches: list[tuple[Tensor, int]]) -> list[tuple[int, Callable[[], Tensor]]]:
    return [(number, lambda x=x, times=times: model(x.clone(), times)) for number, (x, times) in enumerate(batches)]


@pytest.mark.parametrize("in_files", [False, True])
@torch.no_grad()
def test_tell__each_call_meets_its_own(in_files: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, spool = Twice(), Spool(tmp_path if in_files else None)
    xs = [(torch.randn(5, 3), 2), (torch.randn(4, 3), 1)]
    ys = [(torch.randn(5, 3), 2), (torch.randn(4, 3), 1)]
    twins = Twins({}, ["up"], spool, torch.device("cpu"))
    twins.take(model, calls(model, xs), "", ALONE)
    observers = {"up": Observer(Watch(False, None, True), None, paired=True)}
    with observe(model, observers):
        for _, call in twins.tell(observers, calls(model, ys)):
            call()
    seen = observers["up"].seen
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for (x, times), (y, _) in zip(xs, ys, strict=True):
        expected += (1 + 4 * (times - 1)) * (x - y).double().T @ y.double()
    assert seen.paired
    assert seen.drift is not None
    assert float((seen.drift - expected).norm() / expected.norm()) < 1e-6
    assert not any(twins.inputs["up"].values()), "what was told is not kept"
    spool.close()


@torch.no_grad()
def test_tell__what_a_batch_did_not_call_is_not_the_next_ones() -> None:
    model, spool = Twice(), Spool()
    same = torch.randn(4, 3)
    twins = Twins({}, ["up"], spool, torch.device("cpu"))
    twins.take(model, calls(model, [(same, 2), (same, 1)]), "", ALONE)
    observers = {"up": Observer(Watch(False, None, True), None, paired=True)}
    with observe(model, observers):
        for _, call in twins.tell(observers, calls(model, [(same, 1), (same, 1)])):
            call()
    assert observers["up"].seen.paired
    assert observers["up"].seen.drift is not None
    assert not observers["up"].seen.drift.any()


class Fed:
    """As a ``Feed`` of one block, which has an input for each batch."""

    def __init__(self, segment: Any, xs: list[Tensor]) -> None:
        self.segment, self.xs, self.batches = segment, xs, list(range(len(xs)))

    def call(self, model: nn.Module, number: int, batch: int) -> tuple[Tensor, None]:
        return model(self.xs[batch].clone(), 1), None

    def outputs(self, output: Any) -> list[Tensor]:
        return [output[0]]


@torch.no_grad()
def test_outputs__linears_see_both_and_what_is_wanted_lies_half_way() -> None:
    torch.manual_seed(0)
    model, segment = Twice(), object()
    xs, ys = ([torch.randn(4, 3) for _ in range(2)] for _ in range(2))
    feed: Any = Fed(segment, ys)
    twins = Twins({id(segment): cast(Any, Fed(segment, xs))}, [], Spool(), torch.device("cpu"))
    observers = {"up": Observer(Watch(False, None, True), None, paired=True)}
    wanted: dict[int, list[Any]] = {}
    found = dict(twins.outputs(model, feed, 0, observers, True, wanted))
    drift = sum((x - y).double().T @ y.double() for x, y in zip(xs, ys, strict=True))
    assert observers["up"].seen.drift is not None
    assert float((observers["up"].seen.drift - drift).abs().max()) < 1e-5
    for batch, (x, y) in enumerate(zip(xs, ys, strict=True)):
        assert torch.equal(found[batch][0], model.up(x))
        assert float((wanted[batch][0] - (model.up(x) + model.up(y)) / 2).abs().max()) < 1e-6
    assert not dict(twins.outputs(model, feed, 0, {}, False))[0]
