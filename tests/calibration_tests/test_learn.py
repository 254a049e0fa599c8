"""Learned rounding: gradients reach codes and scales, what is kept is never worse, and a block's own output decides."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tolerance import assert_close
from torch.nn import functional as F
from torchao.quantization.granularity import PerGroup

import mmqc.calibration.learn as learning
from mmqc.calibration.learn import Rounding, Start, holding, learn
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


def learned(begun, batches, steps, of=None):
    """``learn`` with the loss of a batch and the weights that are held."""
    now = {}

    @contextmanager
    def held(weights):
        now.update(weights)
        yield
        now.clear()

    return learn(begun, held, lambda batch: (of or loss)(batch, now), batches, steps)


def starts(bits=2, symmetric=True, group=4):
    spec = WeightSpec(bits, PerGroup(group), symmetric=symmetric)
    return {name: Start(rtn.solve(w, spec), bits) for name, w in (("up", UP), ("down", DOWN))}


def total(found):
    return sum(float(loss(batch, {name: q.dequantize() for name, q in found.items()}).double()) for batch in range(3))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
def test_learn__lowers_the_blocks_error_and_says_by_how_much(bits, symmetric):
    begun = starts(bits, symmetric)
    found, before, after = learned(begun, range(3), 80)
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
    found, before, after = learned(begun, range(3), 150)
    assert after < before
    assert any((q.codes != begun[name].solved.codes).any() for name, q in found.items())
    assert all(torch.equal(q.scale, begun[name].solved.scale) for name, q in found.items())


@pytest.mark.parametrize("steps", [0, 3])
def test_learn__never_ends_worse_than_it_began(steps, monkeypatch):
    monkeypatch.setattr(learning, "STRETCH_RATE", 5.0)
    begun = starts(4)
    found, before, after = learned(begun, range(3), steps)
    assert after == before
    assert all(found[name] is begun[name].solved for name in begun)


def test_learn__the_start_is_kept_where_what_was_looked_at_says_nothing_of_the_rest(monkeypatch):
    monkeypatch.setattr(learning, "LOOKED_AT", 1)
    begun = starts(4)
    moved = {name: s.weight() for name, s in begun.items()}

    def only_the_first(batch, weights):
        away = sum((weights[name] - moved[name]).detach().abs().sum() for name in weights)
        return loss(0, weights) * (batch == 0) + 1e6 * away * (batch > 0)

    found, before, after = learned(begun, range(3), 20, only_the_first)
    assert after == before
    assert all(found[name] is begun[name].solved for name in begun)
    found, before, after = learned(begun, range(1), 20, only_the_first)
    assert after < before


def test_learn__twice_is_the_same():
    one, two = (learned(starts(), range(3), 10)[0] for _ in range(2))
    assert all(torch.equal(one[name].codes, two[name].codes) and torch.equal(one[name].scale, two[name].scale) for name in one)


def test_rounding__begins_as_the_weight_that_was_solved():
    for symmetric in (True, False):
        start = starts(3, symmetric)["up"]
        rounding = Rounding(start)
        assert torch.equal(rounding.weight(), start.solved.dequantize())
        assert torch.equal(rounding.solved().codes, start.solved.codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [4, 5])
def test_rounding__gradients_are_those_of_what_is_rounded(symmetric, group):
    columns, values = torch.tensor([2, 7]), torch.randn(16, 2, generator=G)
    rounding = Rounding(replace(starts(2, symmetric, group)["up"], kept=(columns, values)))
    with torch.no_grad():
        rounding.offset.normal_(std=1.5, generator=G)
        rounding.stretch.normal_(std=0.1, generator=G)
    solved, wanted = rounding.start.solved, torch.randn(UP.shape, generator=G)
    offset = rounding.whole(rounding.offset.detach()).clone().requires_grad_()
    stretch = rounding.stretch.detach().reshape(solved.scale.shape).clone().requires_grad_()
    wide = (solved.codes + offset).clamp(-2.5, 1.5)
    codes = wide + (wide.round().clamp(-2, 1) - wide).detach() - (0 if solved.zero is None else solved.by_channel(solved.zero))
    weight = (codes * solved.by_channel(solved.scale * stretch.exp())).index_copy(1, columns, values)
    weight.backward(wanted)
    rounding.take(wanted)
    assert_close(rounding.weight(), weight.detach())
    of_offset = rounding.whole(rounding.offset.grad)
    assert_close(of_offset, offset.grad)
    assert_close(rounding.stretch.grad.reshape(stretch.shape), stretch.grad)
    assert (of_offset == 0).any(1).all()


def test_rounding__columns_that_are_kept_stay():
    columns, values = torch.tensor([2, 5]), torch.randn(16, 2, generator=G)
    start = starts()["up"]
    weight = Rounding(Start(start.solved, 2, (columns, values), torch.bfloat16)).weight()
    assert torch.equal(weight[:, columns], values.bfloat16())
    assert torch.equal(weight[:, :2], start.solved.dequantize()[:, :2].bfloat16())


def test_holding__a_module_has_other_weights_tied_ones_too_and_gets_its_own_back():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    before, other = dict(module.named_parameters(remove_duplicate=False)), torch.randn(4, 4, requires_grad=True)
    with holding(module, {"0.weight": other}):
        (found,) = torch.autograd.grad(module(torch.ones(1, 4)).sum(), other)
        wanted = F.linear(F.linear(torch.ones(1, 4), other, module[0].bias), other, module[1].bias)
        assert torch.equal(found, torch.autograd.grad(wanted.sum(), other)[0])
    assert all(p is before[name] for name, p in module.named_parameters(remove_duplicate=False))
