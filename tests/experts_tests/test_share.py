"""Runs of experts: what each gives for the rows of all adds up to the mixture."""

import copy

import pytest
import torch
from mixtures import EXPERTS, experts_of, mixture, quantized
from tolerance import assert_close

import mmqc
from mmqc.experts.modules import QuantExperts
from mmqc.experts.share import can_share, cut_experts
from mmqc.nn.split import SplitError

RECIPES = {
    "W4A8": mmqc.recipes.rtn(4, 8),
    "W3A16 with zero points": mmqc.recipes.gptq(3, symmetric=False),
    "mquant": mmqc.recipes.mquant(4, solver="rtn"),
}


def called(model):
    """A mixture, and what it is called with."""
    experts = next(m for m in experts_of(model).values() if isinstance(m, QuantExperts))
    x, g = torch.randn(7, experts.up[0].in_features), torch.Generator().manual_seed(0)
    index = torch.rand(7, EXPERTS, generator=g).topk(2).indices
    return experts, (x, index, torch.rand(7, 2, generator=g))


@torch.no_grad()
@pytest.mark.parametrize("recipe", RECIPES)
def test_cut_experts__parts_add_up(recipe):
    model, _ = quantized(mixture().float(), RECIPES[recipe])
    whole, args = called(model)
    total = 0
    for rank in range(EXPERTS):
        part = copy.deepcopy(whole)
        cut_experts(part, rank, EXPERTS)
        assert all(len(stack.qweight) == 1 for stack in part.up)
        total = total + part(*args)
    assert_close(total, whole(*args))


def test_cut_experts__evenly_and_where_the_call_says_who_gets_what():
    model, _ = quantized(mixture().float(), RECIPES["W4A8"])
    whole, _ = called(model)
    assert can_share(whole, EXPERTS)
    assert not can_share(whole, 2)
    with pytest.raises(SplitError, match="the stack of experts of mlp has a width of 5, which 2 ranks cannot share evenly"):
        cut_experts(whole, 0, 2, "mlp")
    model, _ = quantized(mixture("batched").float(), RECIPES["W4A8"])
    assert not any(can_share(m, EXPERTS) for m in experts_of(model).values())
