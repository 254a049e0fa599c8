"""Learned rounding: gradients reach codes and scales, what is kept is never worse, and a block's own output decides."""

import pytest
import torch
from tolerance import assert_close
from torch.nn import functional as F
from torchao.quantization.granularity import PerGroup

import mmqc.calibration.learn as learning
from mmqc.calibration.learn import Rounding, Start, learn
from mmqc.config import WeightSpec
from mmqc.solvers import rtn

G = torch.Generator().manual_seed(0)
INPUTS = [torch.randn(20, 12, generator=G) @ torch.randn(12, 12, generator=G) for _ in range(3)]
UP, DOWN = torch.randn(16, 12, generator=G), torch.randn(12, 16, generator=G)


def block(x, weights):
    """Two linears with a non-linearity between."""
    return F.linear(F.silu(F.linear(x, weights["up"])), weights["down"])


def loss(batch, weights):
    return (block(INPUTS[batch], weights) - block(INPUTS[batch], {"up": UP, "down": DOWN})).square().sum()


def starts(bits=2, symmetric=True, group=4):
    spec = WeightSpec(bits, PerGroup(group), symmetric=symmetric)
    return {name: Start(rtn.solve(w, spec), bits) for name, w in (("up", UP), ("down", DOWN))}


def total(found):
    return sum(float(loss(batch, {name: q.dequantize() for name, q in found.items()}).double()) for batch in range(3))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
def test_learn__lowers_the_blocks_error_and_says_by_how_much(bits, symmetric):
    begun = starts(bits, symmetric)
    found, before, after = learn(begun, loss, range(3), 80)
    assert_close(torch.tensor(before), torch.tensor(total({name: s.solved for name, s in begun.items()})))
    assert_close(torch.tensor(after), torch.tensor(total(found)))
    assert after < 0.8 * before
    for name, q in found.items():
        assert q.codes.dtype == torch.int8
        assert q.codes.min() >= -(2 ** (bits - 1))
        assert q.codes.max() < 2 ** (bits - 1)
        assert (q.scale > 0).all()
        assert not torch.equal(q.scale, begun[name].solved.scale)


def test_learn__codes_move_too(monkeypatch):
    monkeypatch.setattr(learning, "STRETCH_RATE", 0.0)
    begun = starts()
    found, before, after = learn(begun, loss, range(3), 150)
    assert after < before
    assert any((q.codes != begun[name].solved.codes).any() for name, q in found.items())
    assert all(torch.equal(q.scale, begun[name].solved.scale) for name, q in found.items())


@pytest.mark.parametrize("steps", [0, 3])
def test_learn__never_ends_worse_than_it_began(steps, monkeypatch):
    monkeypatch.setattr(learning, "STRETCH_RATE", 5.0)
    begun = starts(4)
    found, before, after = learn(begun, loss, range(3), steps)
    assert after == before
    assert all(found[name] is begun[name].solved for name in begun)


def test_learn__twice_is_the_same():
    one, two = (learn(starts(), loss, range(3), 10)[0] for _ in range(2))
    assert all(torch.equal(one[name].codes, two[name].codes) and torch.equal(one[name].scale, two[name].scale) for name in one)


def test_rounding__begins_as_the_weight_that_was_solved():
    for symmetric in (True, False):
        start = starts(3, symmetric)["up"]
        rounding = Rounding(start)
        assert torch.equal(rounding.weight().detach(), start.solved.dequantize())
        assert torch.equal(rounding.solved().codes, start.solved.codes)


def test_rounding__gradients_are_those_of_what_is_rounded():
    rounding = Rounding(starts()["up"])
    wanted = torch.randn(UP.shape, generator=G)
    rounding.weight().backward(wanted)
    solved = rounding.start.solved
    assert_close(rounding.offset.grad, wanted * solved.by_channel(solved.scale))
    by_group = (wanted * solved.dequantize()).unflatten(1, (-1, 4)).sum(-1)
    assert_close(rounding.stretch.grad, by_group)


def test_rounding__columns_that_are_kept_stay():
    columns, values = torch.tensor([2, 5]), torch.randn(16, 2, generator=G)
    start = starts()["up"]
    weight = Rounding(Start(start.solved, 2, (columns, values))).weight()
    assert torch.equal(weight[:, columns].detach(), values)
    assert torch.equal(weight[:, :2].detach(), start.solved.dequantize()[:, :2])
