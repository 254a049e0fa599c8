"""A linear whose inputs are quantized token by token: its spec, and what quantize_, saving and the backend do with it."""

import copy
import json

import pytest
import torch
from models import tiny_qwen2_vl
from tolerance import assert_close
from torchao.quantization.granularity import PerGroup, PerToken
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc import recipes
from mmqc.checkpoint.module_spec import build_module, module_spec
from mmqc.nn.token_linear import TokenLinear
from mmqc.solvers import Quantized

W4 = mmqc.Scheme(mmqc.WeightSpec(4, PerGroup(8)), mmqc.ActivationSpec(granularity=PerToken(), type="float"))
CONFIGS = {
    "W8A8-token": recipes.rtn(8, activation_bits=8).with_token_scales(),
    "W8A8-fp8-token": recipes.rtn(8, activation_bits=8).with_token_scales().with_float8(),
    "W4A8-g8-token": recipes.rtn(4, activation_bits=8, group_size=8).with_token_scales(),
    "W4A8-g8-fp8-token": mmqc.QuantConfig(W4, W4, W4),
}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize(("name", "config"), CONFIGS.items(), ids=CONFIGS)
def test_quantize__without_data_and_with_gives_the_same_linears(name, config, tmp_path):
    model, inputs = tiny_qwen2_vl()
    assert not config.needs_calibration
    assert mmqc.QuantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    other, float_logits = copy.deepcopy(model), logits(model, inputs)
    mmqc.quantize_(model, config, progress=False)
    linears = [m for m in model.modules() if isinstance(m, TokenLinear)]
    assert {m.scheme for m in linears} == {name}
    mmqc.quantize_(other, config, [inputs], progress=False)
    want = logits(model, inputs)
    assert torch.equal(logits(other, inputs), want)
    assert not torch.equal(want, float_logits)
    mmqc.save_pretrained(model, tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert torch.equal(logits(again, inputs), want)


@pytest.mark.slow
def test_quantize__a_config_given_to_the_backend_quantizes_alike():
    model, inputs = tiny_qwen2_vl()
    compiled, config = copy.deepcopy(model), CONFIGS["W8A8-token"]
    report = mmqc.quantize_(model, config, [inputs], progress=False)
    compiled.compile(backend="mmqc", options={"config": report.config})
    assert_close(logits(compiled, inputs), logits(model, inputs))
    model.compile(backend="mmqc")
    assert_close(logits(model, inputs), logits(compiled, inputs))


def test_spec__rebuilds_the_structure():
    solved = Quantized(torch.randint(-8, 8, (6, 16), dtype=torch.int8), torch.rand(6, 2), group_size=8)
    linear = TokenLinear.from_parts(solved, weight_bits=4, bias=torch.randn(6), float8=True)
    spec = json.loads(json.dumps(module_spec(linear)))
    again = build_module(spec)
    assert module_spec(again) == spec
    assert {n: (t.shape, t.dtype) for n, t in again.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in linear.state_dict().items()
    }
    assert repr(linear) == "TokenLinear(16, 6, W4A8-g8-fp8-token, bias=True, hadamard=False)"
    assert linear.half().weight.dtype == torch.float16
    with pytest.raises(ValueError, match="float8 weights have 8 bits"):
        TokenLinear(16, 6, weight_bits=4, float8=True, float8_weight=True)
    with pytest.raises(ValueError, match="symmetric"):
        TokenLinear.from_parts(
            Quantized(solved.codes, solved.scale, zero=torch.ones(6, 2, dtype=torch.int8), group_size=8), weight_bits=4
        )


def test_config__says_what_cannot_be():
    with pytest.raises(mmqc.ConfigError, match="per_modality"):
        mmqc.ActivationSpec(granularity=PerToken(), per_modality=True)
    with pytest.raises(mmqc.ConfigError, match="static activations"):
        recipes.rtn(8).with_token_scales()
    with pytest.raises(mmqc.ConfigError, match="keep_means"):
        mmqc.Rewrites(keep_means=True)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(("bits", "group", "float8"), [(8, 0, False), (4, 16, False), (4, 16, True), (8, 0, True)])
def test_gradient__is_that_of_the_dequantized_linear(bits, group, float8, hadamard):
    """Adapters in front of the linear learn: the rounding of inputs passes a gradient on."""
    codes = torch.randint(-8, 8, (24, 32), dtype=torch.int8)
    codes = codes.to(torch.float8_e4m3fn) if float8 and bits == 8 else codes
    solved = Quantized(codes, torch.rand(24, 2) if group else torch.rand(24), group_size=group)
    linear = TokenLinear.from_parts(solved, weight_bits=bits, bias=torch.randn(24), float8=float8, hadamard=hadamard)
    x, grad = torch.randn(2, 3, 32, requires_grad=True), torch.randn(2, 3, 24)
    y = linear(x)
    y.backward(grad)
    assert_close(x.grad, grad @ linear.weight)
    with torch.no_grad():
        assert torch.equal(linear(x), y)
