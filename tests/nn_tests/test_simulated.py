"""Fake quantization of what is no plain linear: linears in several precisions, and experts; to the bit that of the integer path."""

import pytest
import torch
from mixtures import experts_of, logits, mixture, quantized, tokens

import mmqc
from mmqc.nn.linear import simulate
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.ops.pack import pack


def without_ops(monkeypatch):
    """The integer ops cannot be called."""
    for name in ("grouped_matmul", "mixed_matmul", "scaled_matmul"):
        monkeypatch.delattr(torch.ops.mmqc, name, raising=False)
        monkeypatch.setattr(torch.ops.mmqc, name, None, raising=False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_simulate__linears_in_two_precisions(dtype, bias, monkeypatch):
    widths, stored, n = [37, 10], [4, 8], 13
    codes = [torch.randint(-8, 8, (n, widths[0])).to(torch.int8), torch.randint(-128, 128, (n, widths[1])).to(torch.int8)]
    linear = MixedLinear.from_stored(
        [pack(codes[0], 4), codes[1]],
        torch.rand(n, 2) + 0.01,
        torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1),
        widths=widths,
        stored=stored,
        activation=[4, 8],
        weight_bits=4,
        order=torch.randperm(47),
        bias=torch.randn(n, dtype=dtype) if bias else None,
        dtype=dtype,
    )
    x = torch.randn(2, 5, 47, dtype=dtype)
    expected = linear(x)
    without_ops(monkeypatch)
    with simulate(linear):
        assert torch.equal(linear(x), expected)
        linear.qweight.zero_()
        assert not torch.equal(linear(x), expected)
    with pytest.raises(TypeError, match="not callable"):
        linear(x)


RECIPES = {
    "W4A8": mmqc.recipes.rtn(4, 8),
    "W4A8 in groups": mmqc.recipes.integer_scale(group_size=5),
    "W3A16 with zero points": mmqc.recipes.gptq(3, 8, symmetric=False),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["interleaved", "sorted"])
def test_simulate__experts(recipe, form, monkeypatch):
    model, _ = quantized(mixture(form).float(), RECIPES[recipe])
    batch = tokens()
    expected = logits(model, batch)
    without_ops(monkeypatch)
    with simulate(model):
        assert torch.equal(logits(model, batch), expected)
        next(iter(experts_of(model).values())).up[0].qweight.zero_()
        assert not torch.equal(logits(model, batch), expected)
