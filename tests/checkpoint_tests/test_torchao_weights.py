"""torchao and mmqc on each other's models: our configs through its ``quantize_``, its weights under our backend."""

import copy

import pytest
import torch
from models import tiny_qwen2_vl
from tolerance import assert_close
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
)
from torchao.quantization import quantize_ as torchao_quantize_

import mmqc
from mmqc import recipes
from mmqc.backend import collect_records
from mmqc.checkpoint.torchao_weights import adopt_torchao_
from mmqc.nn.linear import QuantLinear


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 130), nn.SiLU(), nn.Linear(130, 64, bias=False)).to(dtype).eval()


@pytest.mark.parametrize("config", [recipes.rtn(8), recipes.rtn(4, group_size=2)], ids=["int8", "int4-g2"])
def test_our_config__through_torchao_equals_our_quantize(config):
    model, inputs = tiny_qwen2_vl()
    ours = copy.deepcopy(model)
    mmqc.quantize_(ours, config, progress=False)
    torchao_quantize_(model, config, lambda m, fqn: isinstance(m, nn.Linear) and fqn != "lm_head")
    want, got = ours.state_dict(), model.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, ours(**inputs).logits)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (recipes.mquant(), "cannot be applied without data.*recorded"),
        (recipes.rtn(8, activation_bits=8), "needs calibration"),
        (recipes.rtn(8).replace(keep=("fc1",)), "keep = 'fc1'.*filter_fn"),
    ],
)
def test_our_config__that_torchao_cannot_apply_is_refused_before_anything_changed(config, words):
    model = net()
    with pytest.raises(mmqc.ConfigError, match=words):
        torchao_quantize_(model, config)
    assert all(type(m) is not QuantLinear for m in model)


THEIRS = {
    "int8": Int8WeightOnlyConfig(version=2),
    "int8 dynamic": Int8DynamicActivationInt8WeightConfig(version=2),
    "int4 groups": IntxWeightOnlyConfig(torch.int4, PerGroup(2)),
    "float8": Float8WeightOnlyConfig(),
}


@pytest.mark.filterwarnings("ignore")  # torchao's tensors announce that AOTAutograd cannot cache them
@pytest.mark.parametrize("config", THEIRS.values(), ids=THEIRS)
def test_their_weights__compile_under_our_backend_as_they_are(config):
    model, x = net(), torch.randn(5, 96)
    torchao_quantize_(model, config)
    torch._dynamo.reset()
    with torch.no_grad(), collect_records() as records:
        want = model(x)
        assert_close(torch.compile(model, backend="mmqc")(x), want)
    (record,) = records
    assert record.quantized is (config is THEIRS["int8"])
    (adopted,) = (p for p in record.passes if p.name == "adopt_torchao")
    if record.quantized:
        assert (adopted.n_sites, adopted.misses, record.fallbacks) == (2, [], [])
        assert any("weight_only_matmul" in kernel for kernel in record.kernels)
    else:
        assert adopted.n_sites == 0
        assert len(adopted.misses) == 2
        assert all("run time" in m.reason or "torchao's arithmetic" in m.reason for m in adopted.misses)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_their_weights__in_a_whole_model_get_our_kernel():
    model, inputs = tiny_qwen2_vl()
    torchao_quantize_(model, Int8WeightOnlyConfig(version=2), lambda m, fqn: isinstance(m, nn.Linear) and fqn != "lm_head")
    torch._dynamo.reset()
    with torch.no_grad(), collect_records() as records:
        want = model(**inputs).logits
        model.compile(backend="mmqc")
        assert_close(model(**inputs).logits, want)
    assert sum(p.n_sites for r in records for p in r.passes if p.name == "adopt_torchao") == 24


@pytest.mark.parametrize(
    ("config", "bits", "group"),
    [
        (Int8WeightOnlyConfig(version=2), 8, 0),
        (IntxWeightOnlyConfig(torch.int4, PerGroup(2)), 4, 2),
        (IntxWeightOnlyConfig(torch.int2, PerAxis(0)), 2, 0),
    ],
    ids=["int8", "int4-g2", "int2"],
)
def test_their_weights__become_ours_code_by_code(config, bits, group):
    model, x = net(), torch.randn(5, 96)
    torchao_quantize_(model, config)
    theirs = [module.weight.dequantize() for module in (model[0], model[2])]
    with torch.no_grad():
        want = model(x)
        assert adopt_torchao_(model) == []
        assert [(m.weight_bits, m.group_size) for m in (model[0], model[2])] == [(bits, group)] * 2
        for module, weight in zip((model[0], model[2]), theirs, strict=True):
            assert torch.equal(module.weight, weight)
        assert_close(model(x), want)
        torch._dynamo.reset()
        with collect_records() as records:
            assert_close(torch.compile(model, backend="mmqc")(x), want)
    assert [r.quantized for r in records] == [True]


@pytest.mark.parametrize("name", ["int8 dynamic", "float8"])
def test_their_weights__that_are_not_ours_stay_and_are_named(name):
    model = net()
    torchao_quantize_(model, THEIRS[name])
    left = adopt_torchao_(model)
    assert [r.fqn for r in left] == ["0", "2"]
    assert all(("run time" if "dynamic" in name else "Float8Tensor") in r.reason for r in left)
    assert all(type(m) is nn.Linear for m in (model[0], model[2]))
