"""The stacked experts' arithmetic: to the bit that of floating point, which holds the sums of codes exactly."""

import pytest
import torch
from mixtures import experts_of, logits, mixture, quantized, tokens
from simulated import simulated_products

import mmqc

RECIPES = {
    "W4A8": mmqc.recipes.rtn(4, 8),
    "W4A8 in groups": mmqc.recipes.integer_scale(group_size=5),
    "W3A16 with zero points": mmqc.recipes.gptq(3, 8, symmetric=False),
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
