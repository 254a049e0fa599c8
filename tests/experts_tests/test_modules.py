"""The stacked experts' arithmetic: to the bit that of floating point, which holds the sums of codes exactly."""

import pytest
import torch
from mixtures import experts_of, logits, mixture, quantized, tokens
from simulated import simulated_products
from tolerance import assert_close

import mmqc
from mmqc.experts.call import Rows
from mmqc.experts.modules import QuantStack

RECIPES = {
    "W4A8": mmqc.recipes.rtn(4, 8),
    "W4A8 in groups": mmqc.recipes.integer_scale(group_size=5),
    "W3A16 with zero points": mmqc.recipes.gptq(3, 8, symmetric=False),
    "W3A16 with zero points between the codes": mmqc.recipes.rtn(3, group_size=8, symmetric=False, zero_point="float"),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["interleaved", "sorted"])
def test_quant_experts__equal_simulated_products(recipe, form):
    model, _ = quantized(mixture(form).float(), RECIPES[recipe])
    batch = tokens()
    expected = logits(model, batch)
    with simulated_products() as called:
        assert torch.equal(logits(model, batch), expected)
        assert called["grouped_matmul"].called
        next(iter(experts_of(model).values())).up[0].qweight.zero_()
        assert not torch.equal(logits(model, batch), expected)


@pytest.mark.parametrize("recipe", ["W4A8", "W4A8 in groups"])
def test_quant_stack__gradient_is_the_float_experts(recipe):
    model, _ = quantized(mixture().float(), RECIPES[recipe])
    stack = next(m for m in model.modules() if isinstance(m, QuantStack))
    assert stack.input_scale is not None
    counts = [3, 0, *[2] * (stack.experts - 2)]
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    x = torch.randn(sum(counts), stack.in_features, requires_grad=True)
    upstream = torch.randn(sum(counts), stack.out_features)
    rows = Rows(x, offsets, lambda y: y, None)
    y = stack(x, rows, None)
    with torch.no_grad():
        assert torch.equal(y, stack(x, rows, None))
    (grad,) = torch.autograd.grad(y, x, upstream)
    scale = stack.weight_scale.reshape(*stack.weight_scale.shape[:2], -1)
    spread = scale.repeat_interleave(stack.group_size or stack.in_features, -1)[..., : stack.in_features]
    weights = stack.codes().float() * spread
    expected = torch.cat([g @ w for g, w in zip(upstream.split(counts), weights, strict=True)])
    assert_close(grad, expected)
