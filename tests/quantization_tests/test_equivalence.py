"""The model itself is looked at after the rewrites, and put back if they were wrong."""

import copy

import pytest
import torch
from small_vlm import Small, quantize
from torch import Tensor, nn

import mmqc
from mmqc import recipes
from mmqc.graph.changes import Turned
from mmqc.graph.record import record
from mmqc.quantization.equivalence import Before, RewriteError, check, outputs, precision


def test_equivalence__is_in_the_report() -> None:
    report = quantize(Small(), recipes.rotate())
    assert 0 < report.rewrite_error < 1e-5
    assert f"by {report.rewrite_error:.1e}, relative" in report.summary()
    assert report.to_dict()["rewrite_error"] == report.rewrite_error
    assert quantize(Small(), recipes.rtn(8, 8)).rewrite_error == 0


def test_equivalence__a_wrong_rewrite_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Turned.__call__
    wrong = lambda self, v: right(self, v) if v.shape[0] % 3 else v  # noqa: E731
    monkeypatch.setattr(Turned, "__call__", wrong)
    model = Small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RewriteError, match="the exact rewrites changed the model's output by"):
        quantize(model, recipes.rotate())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Answers(nn.Module):
    """Gives ``value`` times a gain, whatever it is asked."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.gain, self.value = nn.Parameter(torch.ones(3, dtype=value.dtype)), value

    def forward(self) -> Tensor:
        return self.value * self.gain if self.value.shape == self.gain.shape else self.value


@pytest.mark.parametrize(
    ("after", "dtype", "fails"),
    [
        (torch.ones(3).double() * (1 + 1e-10), torch.float64, False),
        (torch.ones(3).double() * (1 + 1e-8), torch.float64, True),
        (torch.ones(3) * 1.000008, torch.float32, False),
        (torch.ones(3) * 1.0001, torch.float32, True),
        (torch.ones(3) * 1.007, torch.bfloat16, False),
        (torch.ones(3) * 1.05, torch.bfloat16, True),
        (torch.ones(3) * 1.01, torch.float16, True),
        (torch.tensor([1.0, float("nan"), 1.0]), torch.float32, True),
        (torch.ones(4), torch.float32, True),
    ],
)
def test_check__bars(after: Tensor, dtype: torch.dtype, fails: bool) -> None:
    before = Before.of(Answers(torch.ones(3, dtype=dtype)), [{}])
    if fails:
        with pytest.raises(mmqc.RewriteError):
            check(Answers(after.to(dtype)), before, dtype)
    else:
        assert 0 < check(Answers(after.to(dtype)), before, dtype) < 0.01


def test_check__what_the_model_makes_of_rounding_is_allowed_and_no_more() -> None:
    class Amplifies(nn.Module):
        def __init__(self, moved: float) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(8))
            self.moved = moved

        def forward(self) -> Tensor:
            return torch.ones(8) + 1e3 * (self.gain - 1) + self.moved

    before = Before.of(Amplifies(0), [{}])
    gains = Amplifies(6e-5)
    assert 5e-5 < check(gains, before, torch.float32) < 7e-5
    assert bool((gains.gain == 1).all())  # put back
    with pytest.raises(RewriteError, match="rounding explains"):
        check(Amplifies(1e-2), before, torch.float32)


def test_check__looks_at_every_call() -> None:
    class Doubles(nn.Module):
        def __init__(self, wrong: float = 0) -> None:
            super().__init__()
            self.wrong = wrong

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x + self.wrong * (x > 2)

    calls = [{"x": torch.ones(2) * i} for i in (1, 2, 3)]
    assert check(Doubles(), Before.of(Doubles(), calls), torch.float32) == 0
    with pytest.raises(RewriteError):
        check(Doubles(0.1), Before.of(Doubles(), calls), torch.float32)


def test_precision__is_the_coarsest_of_the_recording() -> None:
    class Upcasts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().exp().to(x.dtype) + x

    for inside, dtype in ((torch.float32, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        assert precision(record(Upcasts(), {"x": torch.ones(3, dtype=dtype)})) == inside
    assert precision(record(nn.GELU(), {"input": torch.ones(3, dtype=torch.float64)})) == torch.float64


def test_check__infinite_places_may_stay_infinite() -> None:
    masked = torch.tensor([1.0, float("-inf"), 1.0])
    assert check(Answers(masked), Before.of(Answers(masked.clone()), [{}]), torch.float32) == 0


def test_outputs__logits_alone_where_there_are_logits() -> None:
    class Shows(torch.nn.Module):
        def forward(self, x: Tensor, logits: bool) -> dict[str, Tensor]:
            return {"hidden": x, **({"logits": 2 * x} if logits else {}), "ids": x.long()}

    x = torch.ones(2, 3)
    assert [t.tolist() for t in outputs(Shows(), {"x": x, "logits": True})] == [(2 * x).tolist()]
    assert [t.tolist() for t in outputs(Shows(), {"x": x, "logits": False})] == [x.tolist()]
