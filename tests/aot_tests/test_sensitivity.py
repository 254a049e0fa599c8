"""By how much a model's logits move where its inputs do by a rounding error."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmqc
from mmqc import recipes
from mmqc.aot.programs import Whole
from mmqc.aot.sensitivity import DRAWS, MOST, ROUNDED, moved, moved_row, within
from mmqc.export import _Job

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))


def test_moved__a_sum_moves_by_a_rounding_error() -> None:
    assert 0 < moved(lambda x: x.sum(1), {"x": X}) < 1e-4


def test_moved__a_tie_moves_by_a_step() -> None:
    def rounded(x: Tensor) -> Tensor:
        return torch.round(x / 2)  # 1, 3, 5, ... lie between two codes

    odd = 1.0 + 2 * torch.arange(40.0)
    assert moved(rounded, {"x": odd}) > 1e-2
    assert moved(rounded, {"x": odd + 0.5}) == 0


def test_moved_row__one_row_of_many() -> None:
    """In one of forty rows a code is on the other side of a tie."""

    near_a_tie = 1.4 + 2 * torch.arange(120.0).view(40, 3)
    near_a_tie[0, 0] = 3.0
    found, of_a_row = (f(lambda x: torch.round(x / 2), {"x": near_a_tie}) for f in (moved, moved_row))
    assert found < 0.01
    assert of_a_row == pytest.approx(1 / torch.round(near_a_tie[0] / 2).norm().item(), rel=0.5)


def test_moved__is_the_same_every_time_and_changes_nothing() -> None:
    given, state = X.clone(), torch.get_rng_state()
    first = moved(lambda x: x.tanh(), {"x": given})
    assert moved(lambda x: x.tanh(), {"x": given}) == first
    assert torch.equal(given, X)
    assert torch.equal(torch.get_rng_state(), state)


def test_moved__without_floats_that_may_move() -> None:
    given = {"ids": torch.arange(4), "attention_mask": torch.ones(4)}
    assert moved(lambda ids, attention_mask: ids * attention_mask, given) == 0


def test_moved__what_modules_return_moves_too() -> None:
    """Without a float among the inputs, and in half precision with every layer; nothing stays behind."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32) for _ in range(8)]
    model = nn.Sequential(nn.Embedding(9, 32), *layers).to(torch.bfloat16).eval()
    ids = {"input": torch.arange(9)}
    assert moved(model, ids) == 0
    assert 1e-3 < moved(model, ids, model) < 1e-2  # of eight layers, each of which is rounded to 2^-8
    assert within(0.001) == ROUNDED < within(0.1) == 0.2 < within(9.0) == MOST
    assert not any(m._forward_hooks for m in model.modules())


def test_moved__of_every_output() -> None:
    assert moved(lambda x: [x * 0 + 1, torch.round(x)], {"x": 0.5 + torch.arange(40.0)}) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_moved__in_the_type_of_the_inputs(dtype: torch.dtype) -> None:
    seen: list[Any] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    assert moved(keep, {"x": X.to(dtype)}) > 0
    assert {x.dtype for x in seen} == {dtype}
    assert len(seen) == DRAWS + 1


@pytest.mark.parametrize(("bits", "moves"), [(8, False), (4, True)])
def test_moved__four_bits_of_activations_move_by_more_than_a_code(bits: int, moves: bool) -> None:
    sample = mmqc.samples.load("digits-vqa")
    batches = sample.calibration(2)
    mmqc.quantize_(sample.model, recipes.per_token(4, bits, solver="rtn"), calibration=batches, progress=False)
    assert (moved(Whole(sample.model), batches[0], sample.model) > ROUNDED) == moves
    job = _Job(sample.model, batches, None, print)
    assert job.bound == ROUNDED  # a package for a CPU adds up as the model does
    job.on_cpu = False
    assert (job.bound > ROUNDED) == moves
    assert job.bound <= job.bound_of_a_token <= MOST
