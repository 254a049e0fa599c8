"""A linear of 4-bit floats: its spec and parts, and what quantize_, saving and the backend do with it."""

import copy
import json

import pytest
import torch
from models import tiny_qwen2_vl
from tolerance import assert_close
from torch import nn
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc import recipes
from mmqc.checkpoint.module_spec import build_module, module_spec
from mmqc.nn.float4_linear import Float4Linear
from mmqc.nn.split import cut_inputs, cut_outputs
from mmqc.solvers import solve
from mmqc.specs import BLOCKS

BITS = {"mxfp4": 4.25, "nvfp4": 4.5}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


def linear(form, n=12, k=96, bias=True):
    spec = recipes.rtn(4).with_float4(form).language.weight
    return Float4Linear.from_parts(solve(torch.randn(n, k), spec), bias=torch.randn(n) if bias else None)


@pytest.mark.parametrize(
    ("form", "recipe"),
    [
        ("mxfp4", recipes.rtn(4)),
        pytest.param("nvfp4", recipes.awq(4), marks=pytest.mark.slow),
        pytest.param("nvfp4", recipes.gptq(4), marks=pytest.mark.slow),
    ],
)
def test_quantize__saved_and_loaded(form, recipe, tmp_path):
    model, inputs = tiny_qwen2_vl()
    config = recipe.with_float4(form)
    assert mmqc.QuantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    before = logits(model, inputs)
    report = mmqc.quantize_(model, config, [inputs], progress=False)
    linears = [m for m in model.modules() if isinstance(m, Float4Linear)]
    assert {m.scheme for m in linears} == {row.scheme for row in report.layers} == {f"W4A16-{form}"}
    assert f"language W4A16-{form} ({BITS[form]} bits a weight)" in report.summary()
    want = logits(model, inputs)
    assert 0 < (want - before).norm() < 0.5 * before.norm()
    mmqc.save_pretrained(model, tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert torch.equal(logits(again, inputs), want)


def test_quantize__without_data_as_with_data():
    model, inputs = tiny_qwen2_vl()
    config, other = recipes.rtn(4).with_float4("nvfp4"), copy.deepcopy(model)
    assert not config.needs_calibration
    mmqc.quantize_(model, config, progress=False)
    mmqc.quantize_(other, config, [inputs], progress=False)
    assert torch.equal(logits(model, inputs), logits(other, inputs))


@pytest.mark.slow
def test_quantize__a_config_given_to_the_backend_quantizes_alike():
    model, inputs = tiny_qwen2_vl()
    compiled = copy.deepcopy(model)
    report = mmqc.quantize_(model, recipes.rtn(4).with_float4("nvfp4"), [inputs], progress=False)
    compiled.compile(backend="mmqc", options={"config": report.config})
    assert_close(logits(compiled, inputs), logits(model, inputs))


@pytest.mark.parametrize("form", BLOCKS)
def test_spec__round_trip_and_dtypes(form):
    made = linear(form)
    again = build_module(json.loads(json.dumps(module_spec(made))))
    assert {n: (t.shape, t.dtype) for n, t in again.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in made.state_dict().items()
    }
    weight, bits = made.weight, 8 * sum(t.numel() * t.itemsize for n, t in made.named_buffers() if n in ("qweight", "weight_scale"))
    assert bits / weight.numel() == BITS[form]
    half = copy.deepcopy(made).to(torch.bfloat16)
    assert torch.equal(half.weight, weight.bfloat16())
    assert half.bias.dtype == torch.bfloat16
    assert form not in ("nvfp4",) or half.weight_divisor.dtype == torch.float32


@pytest.mark.parametrize("form", BLOCKS)
def test_split__parts_of_ranks_add_up(form):
    made, x = linear(form, bias=False), torch.randn(3, 96)
    rows, columns = [copy.deepcopy(made) for _ in "ab"], [copy.deepcopy(made) for _ in range(3)]
    for rank, part in enumerate(rows):
        cut_outputs(part, rank, 2)
    for rank, part in enumerate(columns):
        cut_inputs(part, rank, 3)
    assert_close(torch.cat([part(x) for part in rows], -1), made(x))
    assert_close(sum(part(x[:, 32 * r : 32 * r + 32]) for r, part in enumerate(columns)), made(x))


def test_outliers_and_hadamard__are_in_the_weight():
    made = linear("nvfp4", bias=False)
    columns = torch.randn(12, 2)
    spec = recipes.rtn(4).with_float4("nvfp4").language.weight
    w = torch.randn(12, 96)
    index = torch.tensor([3, 50])
    made = Float4Linear.from_parts(solve(w, spec, skip=index), outliers=(index, columns), hadamard=True)
    x = torch.randn(4, 96)
    assert_close(made(x), nn.functional.linear(x, made.weight))
    again = build_module(module_spec(made)).to_empty(device="cpu")
    again.load_state_dict(made.state_dict())
    again.rebuild_factors(torch.device("cpu"))
    assert torch.equal(again(x), made(x))
