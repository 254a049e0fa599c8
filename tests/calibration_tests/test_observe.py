"""What a statistic is shown at each kind of place, hooks that go also after an error, and two threads that share nothing."""

from typing import Any

import pytest
import torch
from threads import in_step
from tolerance import assert_close
from torch import Tensor, nn

from mmqc.calibration.calibrate import Observer, Watch
from mmqc.calibration.observe import Call, Output, linear_input, observe
from mmqc.config import ActivationSpec
from mmqc.nn.online_hadamard import HadamardLinear


class Log(list[Any]):
    """A statistic that keeps what it is shown."""

    def update(self, *values: Any) -> None:
        self.append(values)


class Scaled(nn.Linear):
    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return super().forward(x) * factor


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, factor=2.0))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_observe__shows_inputs_arguments_and_outputs() -> None:
    model, x = Two(), torch.randn(3, 4)
    places = {"second": Log(), Call("first"): Log(), Output("first"): Log(), Output("second"): Log()}
    with observe(model, places) as seen:
        y = model(x)
    assert seen is places
    assert hooks(model) == 0
    ((args, kwargs),) = seen[Call("first")]
    assert args[0] is x
    assert kwargs == {"factor": 2.0}
    ((h, *call),) = seen[Output("first")]
    assert torch.equal(h, model.first(x, factor=2.0))
    assert call == [args, kwargs]
    assert torch.equal(seen["second"][0][0], h)
    assert not seen["second"][0][0].requires_grad, "what a linear multiplies comes without its graph"
    assert seen[Output("second")][0][0] is y
    model(x)
    assert len(seen["second"]) == 1, "nothing is seen behind the block"


def test_observe__takes_functions_and_leaves_the_output_alone() -> None:
    model, x, seen = Two(), torch.randn(3, 4), []

    def note(*values: Any) -> int:
        seen.append(values)
        return 7

    expected = model(x)
    with observe(model, {"first": note, Call("second"): note, Output("second"): note}):
        assert torch.equal(model(x), expected)
    assert [len(values) for values in seen] == [1, 2, 3]


def test_observe__a_linear_shows_what_its_weight_multiplies() -> None:
    model, x = nn.Sequential(HadamardLinear(8, 4, bias=False)), torch.randn(2, 8)
    nn.init.normal_(model[0].weight)
    with observe(model, {"0": Log()}) as seen:
        y = model(x)
    ((rotated,),) = seen["0"]
    assert_close(rotated @ model[0].weight.T, y)
    assert torch.equal(rotated, linear_input(model[0], x))
    assert not torch.equal(rotated, x)


def test_observe__hooks_go_after_an_error() -> None:
    model = Two()
    with pytest.raises(AttributeError, match="third"), observe(model, {"first": Log(), Call("third"): Log()}):
        pass
    assert hooks(model) == 0

    def fail(*values: Any) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"), observe(model, {"first": Log(), Output("first"): fail, "second": Log()}):
        model(torch.randn(3, 4))
    assert hooks(model) == 0


def test_observe__two_threads_do_not_mix() -> None:
    def run(model: nn.Module, seed: int) -> dict[str, Any]:
        spec = ActivationSpec(8, observer="percentile")
        observers = {n: Observer(Watch(True, spec, True), None) for n in ("first", "second")}
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad(), observe(model, observers) as seen:
            for _ in range(5):
                model(torch.randn(30, 4, generator=generator))
        return {n: o.seen.finish() for n, o in seen.items()}

    models = [Two(), Two()]
    alone = [run(model, seed) for seed, model in enumerate(models)]
    runs = [lambda model=model, seed=seed: run(model, seed) for seed, model in enumerate(models)]
    for one, two in zip(alone, in_step(runs, models, "second"), strict=True):
        for name, expected in one.items():
            assert torch.equal(two[name].hessian, expected.hessian)
            assert two[name].rows == expected.rows == 150
            for modality, wanted in expected.ranges.items():
                found = two[name].ranges[modality]
                assert (found.low, found.high, found.count) == (wanted.low, wanted.high, wanted.count)
                assert wanted.histogram is None or torch.equal(found.histogram, wanted.histogram)
    assert not torch.equal(alone[0]["first"].hessian, alone[1]["first"].hessian)
