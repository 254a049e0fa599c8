"""The estimate's weights are those of the quantized model, byte for byte, wherever towers share a scheme."""

import copy

import pytest
import torch
from models import tiny_qwen2_vl

import mmqc
from mmqc import recipes
from mmqc.checkpoint.parallel.hf_parallel import starred
from mmqc.cli.memory_estimate import available, estimate, per_rank
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.split import cut_inputs, cut_outputs, why_not_by_inputs
from mmqc.quantization.convert import size_of

CONFIGS = {
    "w8": recipes.rtn(8),
    "w4-g8": recipes.rtn(4, group_size=8),
    "w4-g8-asym": recipes.rtn(4, group_size=8, symmetric=False),
    "w2-g8-asym-float": recipes.rtn(2, group_size=8, symmetric=False, zero_point="float"),
    "w8a8": recipes.rtn(8, activation_bits=8),
    "mxfp4": recipes.rtn(4).with_float4("mxfp4"),
    "nvfp4": recipes.rtn(4).with_float4("nvfp4"),
    "head": recipes.rtn(4, head_bits=8),
    "keep": recipes.rtn(8).replace(keep=("lm_head", "fc1")),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_estimate__weights_before_and_after(config, tied):
    model, inputs = tiny_qwen2_vl(tied=tied)
    skeleton = copy.deepcopy(model).to("meta")
    if tied:
        skeleton.tie_weights()
    guess = estimate(skeleton, config)
    report = mmqc.quantize_(model, config, [inputs] if config.needs_calibration else None, progress=False)
    assert guess.weights == report.size_before
    assert guess.quantized == report.size_after == size_of(model)
    assert guess.linears == len(report.layers)
    assert guess.moments == 0


def test_estimate__second_moments_and_the_largest_weight():
    model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Linear(40, 8)).to(torch.bfloat16)
    guess = estimate(model, recipes.mquant(4))
    assert guess.moments == 4 * (16**2 + 40**2)
    assert guess.largest == 4 * 640
    assert guess.peak == guess.weights + guess.quantized + guess.moments + guess.largest
    assert estimate(model, recipes.mquant(4, solver="rtn")).moments == 0


@pytest.mark.parametrize(("form", "bits"), [("mxfp4", 4.25), ("nvfp4", 4.5)])
def test_estimate__bits_of_a_weight(form, bits):
    config = recipes.rtn(4).with_float4(form)
    found = estimate(torch.nn.Sequential(torch.nn.Linear(256, 512)), config).bits
    assert bits <= found < bits + 0.001
    assert config.language.weight.bits_with_scales == bits


@pytest.mark.parametrize("config", [CONFIGS["w4-g8"], CONFIGS["head"]], ids=["w4-g8", "head"])
def test_per_rank__bytes_of_a_rank(config):
    model, _ = tiny_qwen2_vl(tied=False)
    guess = per_rank(copy.deepcopy(model).to("meta"), config, 2)
    mmqc.quantize_(model, config, None, progress=False)
    for name, module in model.named_modules():
        style = model.tp_plan.get(starred(name)) or ("colwise" if name == "lm_head" else None)
        if style is not None and isinstance(module, PackedLinear):
            adds_up = style == "rowwise" and not why_not_by_inputs(module, 2)
            (cut_inputs if adds_up else cut_outputs)(module, 0, 2, name)
        elif starred(name) in model.tp_plan and type(module) is torch.nn.Linear:  # a head of floats, in newer versions' plans
            module.weight = torch.nn.Parameter(module.weight[: module.out_features // 2].detach().clone())
    assert guess == size_of(model)


def test_per_rank__is_of_models_that_ranks_can_share():
    model, _ = tiny_qwen2_vl()
    assert per_rank(model, recipes.rtn(8), 4) is None, "6 heads"
    assert per_rank(torch.nn.Sequential(torch.nn.Linear(16, 40)), recipes.rtn(8), 2) is None


def test_size_of__counts_shared_tensors_once():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert size_of(model) == 4 * 4 * 4


def test_available__is_a_plausible_number():
    free = available()
    assert free is None or 2**20 < free < 2**50
