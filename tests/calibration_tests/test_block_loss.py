"""The module that judges some linears, and its error with other weights, against the same computed by hand."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import Tensor, nn

from mmqc.calibration.block_loss import Calls, holder
from mmqc.calibration.calibrate import EQUAL, TEXT, VISUAL
from mmqc.calibration.observe import observe
from mmqc.calibration.spool import Spool
from mmqc.nn.modality import ModalityContext


@pytest.mark.parametrize(
    ("linears", "normed", "block", "expected"),
    [
        (["a.0.b.q", "a.0.b.k"], True, "a.0", "a.0.b"),
        (["a.0.b.q", "a.0.m.up"], True, "a.0", "a.0"),
        (["a.0.b.q", "a.1.b.q"], True, "", ""),
        (["a.0.b.q"], True, "a.0", "a.0.b"),
        (["a.0.b.q"], False, "a.0", ""),
        (["a.0.b.q"], True, "a.0.b.q", ""),
    ],
)
def test_holder__is_the_smallest_module_around(linears: list[str], normed: bool, block: str, expected: str) -> None:
    def one() -> nn.Module:
        return nn.Sequential(OrderedDict(b=nn.Sequential(), m=nn.Sequential()))

    model = nn.Module()
    model.a = nn.ModuleList([one(), one()])
    assert holder(model, linears, normed, block) == expected


class Gated(nn.Module):
    """Takes a keyword, writes to its input, and returns more than one value."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, *, factor: float, cache: Any = None) -> tuple[Tensor, None]:
        y = self.up(x) * torch.sigmoid(self.gate(x)) * factor
        x.zero_()
        return y, None


@torch.no_grad()
@pytest.mark.parametrize("weights", [EQUAL, {TEXT: 0.5, VISUAL: 4.0}])
def test_error__is_that_of_the_modules_output_over_all_calls(weights: dict[str, float]) -> None:
    model, context = nn.ModuleDict({"mlp": Gated()}).double(), ModalityContext()
    calls = Calls(model, "mlp", Spool(), torch.device("cpu"), context, True)
    inputs = [torch.randn(1, n, 6, dtype=torch.float64) for n in (3, 4)]
    masks = [torch.arange(x.shape[1])[None] < 2 for x in inputs]
    with observe(model, calls.places):
        for x, mask in zip(inputs, masks, strict=True):
            context.visual = mask
            model["mlp"](x.clone(), factor=2.0)
    before = model["mlp"].up.weight.clone()
    other = before + 0.1 * torch.randn_like(before)
    found = calls.errors([{"mlp.up.weight": other}], weights)[0]
    assert torch.equal(model["mlp"].up.weight, before)
    expected = torch.zeros((), dtype=torch.float64)
    for x, mask in zip(inputs, masks, strict=True):
        error = 2.0 * (x @ (other - before).T) * torch.sigmoid(model["mlp"].gate(x))
        row_weight = torch.where(mask, weights[VISUAL], weights[TEXT])[..., None]
        expected += (row_weight * error.square()).sum()
    assert_close(torch.tensor(found, dtype=torch.float64), expected)
    assert calls.errors([{}], weights) == [0.0]


def test_calls__that_cannot_be_repeated_say_why() -> None:
    model = nn.ModuleDict({"mlp": Gated()})
    calls = Calls(model, "mlp", Spool(), torch.device("cpu"), None, True)
    with torch.no_grad(), observe(model, calls.places):
        model["mlp"](torch.randn(2, 6), factor=1.0, cache=[object()])
    assert calls.reason == "mlp cannot be run again: its blocks take a object, which may not be passed twice"
    assert calls.calls == calls.wanted == []
