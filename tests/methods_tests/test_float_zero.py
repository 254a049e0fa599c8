"""Whole models with zero points between the codes, by every recipe: what was solved is what is computed and compiled."""

from typing import Any

import pytest
import torch
from models import tiny_qwen2_vl
from often import often
from tolerance import assert_close
from torch import nn

import mmqc
from mmqc import recipes
from mmqc.backend import backend
from mmqc.nn.linear import QuantLinear

OPTIONS: dict[str, Any] = {"symmetric": False, "zero_point": "float"}
RECIPES = {
    "rtn": recipes.rtn(3, group_size=8, **OPTIONS),
    "mse_clip": recipes.rtn(2, group_size=8, solver="mse_clip", **OPTIONS),
    "gptq": recipes.gptq(2, 8, **OPTIONS),
    "gptq of rows": recipes.gptq(4, clip="weights", **OPTIONS),
    "awq": recipes.awq(3, 8, **OPTIONS),
    "learned": recipes.learned(2, 8, steps=4, **OPTIONS),
}


@pytest.mark.parametrize("name", often(RECIPES, "gptq"))
def test_recipes__what_was_solved_is_what_is_computed(name: str) -> None:
    model, batch = tiny_qwen2_vl()
    mmqc.quantize_(model, RECIPES[name], [batch] if RECIPES[name].needs_calibration else None, progress=False)
    with torch.no_grad():
        got = model(**batch).logits
    linears = {fqn: m for fqn, m in model.named_modules() if isinstance(m, QuantLinear)}
    zeros = [linear.weight_zero for linear in linears.values()]
    assert linears
    assert all(zero is not None and zero.dtype == torch.float16 for zero in zeros)
    assert any((zero != zero.round()).any() for zero in zeros if zero is not None)
    for fqn, linear in linears.items():
        plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        plain.weight.data = linear.weight
        if linear.bias is not None:
            plain.bias.data = linear.bias
        model.set_submodule(fqn, plain)
    with torch.no_grad():
        assert_close(got, model(**batch).logits)


@pytest.mark.slow
def test_recipes__compiled_as_they_are_eager() -> None:
    torch._dynamo.reset()
    model, batch = tiny_qwen2_vl()
    mmqc.quantize_(model, RECIPES["mse_clip"], progress=False)
    with torch.no_grad():
        want = model(**batch).logits
        model.compile(backend=backend)
        assert_close(model(**batch).logits, want)
    torch._dynamo.reset()
