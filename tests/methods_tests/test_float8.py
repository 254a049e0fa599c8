"""float8_e4m3fn from a recipe to logits: quantized, compiled, saved and loaded, beside what it has no form for."""

import copy
import json

import pytest
import torch
from models import tiny_qwen2_vl
from often import often
from simulated import simulated_products
from small_vlm import Small, batches, logits, quantize
from torch import nn
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc import recipes
from mmqc.backend import backend, collect_records
from mmqc.config import ConfigError
from mmqc.nn.linear import QuantLinear
from mmqc.ops.pack import FLOAT8

CONFIGS = {
    "W8A8-fp8": recipes.rtn(8, 8).with_float8(),
    "W8A8-fp8, rotated": recipes.mquant(8, suppress=False).with_float8(),
    "W8A8-fp8, suppressed": recipes.mquant(8).with_float8(),
    "W4A8-fp8": recipes.mquant(4).with_float8(),
}


def linears(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@pytest.mark.parametrize("name", CONFIGS)
def test_quantize__is_the_float_model_but_for_rounding(name: str) -> None:
    model = Small().eval()
    want = logits(model, batches()[0])
    report = quantize(model, CONFIGS[name])
    assert {row.scheme for row in report.layers} == {name.partition(",")[0]}
    stored = {m.qweight.dtype for m in linears(model).values()}
    assert stored == {FLOAT8 if name.startswith("W8") else torch.uint8}
    got = logits(model, batches()[0])
    assert 0 < (got - want).norm() < (0.15 if name.startswith("W8") else 0.4) * want.norm()
    with simulated_products() as called:
        assert torch.equal(logits(model, batches()[0]), got)
        assert called["scaled_matmul"].called


def test_quantize__float8_loses_less_than_int8_where_magnitudes_differ() -> None:
    """A float's error is a share of the number, an integer's a share of the largest one."""
    loss = {}
    for name, config in {"int8": recipes.rtn(8, 8), "float8": recipes.rtn(8, 8).with_float8()}.items():
        model = Small().eval()
        for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
            linear.weight.data[:, ::16] *= 60
        want = logits(model, batches()[0])
        quantize(model, config)
        loss[name] = ((logits(model, batches()[0]) - want).norm() / want.norm()).item()
    assert loss["float8"] < loss["int8"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["W8A8-fp8, suppressed", "W4A8-fp8"])
def test_backend__compiled_equals_eager(name: str) -> None:
    torch._dynamo.reset()
    model = Small().eval()
    quantize(model, CONFIGS[name])
    compiled = copy.deepcopy(model)
    compiled.compile(backend=backend)
    with collect_records() as records:
        got = logits(compiled, batches()[0])
    want = logits(model, batches()[0])
    assert (got - want).norm() <= 0.02 * want.norm()  # a float32 sum in another order moves a code of three bits
    products = {op for record in records for op in record.ops if "matmul" in op}
    assert products <= {"scaled_matmul", "scaled_matmuls"}  # epilogues are of integers
    assert {reason for r in records for op, reason in r.fallbacks if "matmul" in op} == {"float8 on cpu: float64 matmul instead"}


@pytest.mark.parametrize("name", often(("W8A8-fp8, suppressed", "W4A8-fp8"), "W4A8-fp8"))
def test_save__loads_as_it_was_in_any_dtype(tmp_path, name: str) -> None:
    model, inputs = tiny_qwen2_vl()
    mmqc.quantize_(model, CONFIGS[name], [inputs], progress=False)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    half = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for fqn, linear in linears(half).items():
        kept = model.get_submodule(fqn)
        assert linear.float8
        assert linear.float_dtype == torch.bfloat16
        assert linear.qweight.dtype == kept.qweight.dtype
        assert torch.equal(linear.qweight.view(torch.uint8), kept.qweight.view(torch.uint8)), fqn
        assert linear.weight_scale.dtype == torch.float32


def test_load__a_spec_from_before_float8_still_builds() -> None:
    from mmqc.checkpoint.module_spec import build_module, module_spec

    model = Small().eval()
    quantize(model, recipes.rtn(8, 8))
    spec = json.loads(json.dumps(module_spec(next(iter(linears(model).values())))))
    assert spec.pop("float8") is False
    assert build_module(spec).qweight.dtype == torch.int8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_quant_linear__codes_survive_a_change_of_dtype(dtype: torch.dtype) -> None:
    model = Small().eval()
    quantize(model, CONFIGS["W8A8-fp8"])
    linear = next(iter(linears(model).values()))
    before = linear.qweight.clone()
    linear.to(dtype)
    assert linear.qweight.dtype == FLOAT8
    assert torch.equal(linear.qweight.view(torch.uint8), before.view(torch.uint8))
    assert linear.weight.dtype == dtype
    assert linear.to_empty(device="meta").qweight.dtype == FLOAT8


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: recipes.rtn(4).with_float8(), "schemes with quantized activations"),
        (lambda: recipes.rtn(4, 8, group_size=32).with_float8(), r"PerRow\(\) beside static activations of type 'float'"),
        (lambda: mmqc.WeightSpec(4, type="float"), "'float' for 8 bits a channel"),
        (lambda: mmqc.WeightSpec(8, solver="gptq", type="float"), "'float' for 8 bits a channel"),
        (
            lambda: mmqc.WeightSpec(8, type="bfloat"),  # type: ignore[arg-type]
            "WeightSpec.type = 'bfloat'",
        ),
        (lambda: mmqc.Scheme(mmqc.WeightSpec(8, type="float")), "'float' beside activations of type 'float'"),
        (lambda: mmqc.Scheme(mmqc.WeightSpec(8), mmqc.ActivationSpec(type="float")), "only 'int' to 4 bits"),
    ],
)
def test_config__refuses(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_backend__quantizes_an_untouched_model_alike() -> None:
    torch._dynamo.reset()
    model, untouched = Small().eval(), Small().eval()
    untouched.load_state_dict(model.state_dict())
    report = quantize(model, CONFIGS["W8A8-fp8"])
    compiled = torch.compile(untouched, backend="mmqc", options={"config": report.config})
    want = logits(model, batches()[0])
    got = logits(compiled, batches()[0])
    assert (got - want).norm() <= 0.02 * want.norm()
    assert ((got - logits(untouched, batches()[0])).norm() / want.norm()).item() > 1e-3
