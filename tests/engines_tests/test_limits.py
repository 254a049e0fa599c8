"""Recipes within an engine's limits: what changes, what stays, and what is refused by name."""

import dataclasses

import pytest
from torchao.quantization.granularity import PerGroup, PerRow

import mmqc
from mmqc import recipes
from mmqc.engines.limits import for_engine

ENGINE = "vllm==0.33"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (recipes.mquant(4), "W4A8-g128-fp8-token"),
        (recipes.rtn(4, activation_bits=8, group_size=32), "W4A8-g128-fp8-token"),
        (recipes.mquant(8), "W8A8-token"),
        (recipes.mquant(8, msq=False), "W8A8"),
        (recipes.mquant(8).with_float8(), "W8A8-fp8-token"),
        (recipes.rtn(8, activation_bits=8).with_float8(), "W8A8-fp8"),
        (recipes.per_token(8, 8), "W8A8-token"),
        (recipes.gptq(4, 128), "W4A16-g128"),
        (recipes.awq(4, symmetric=False), "W4A16-g128-asym"),
        (recipes.rtn(8), "W8A16"),
        (recipes.integer_scale(8, group_size=128), "W8A8"),
    ],
)
def test_for_engine__schemes(config, words):
    made = for_engine(config, ENGINE)
    assert {str(s) for s in made.schemes.values()} == {words}
    assert for_engine(made, ENGINE) == made
    assert mmqc.QuantConfig.from_dict(made.to_dict()) == made


def test_for_engine__int8_beside_4_bits_takes_groups_that_no_other_kernel_has():
    made = recipes.for_engine(recipes.mquant(4), ENGINE, activations="int8")
    assert {str(s) for s in made.schemes.values()} == {"W4A8-g32-token"}


def test_for_engine__towers_keep_their_bits_and_solvers():
    made = for_engine(recipes.mquant(4, vision_weight_bits=8, solver="mse_clip"), ENGINE)
    assert (str(made.vision), str(made.language)) == ("W8A8-token", "W4A8-g128-fp8-token")
    assert made.vision.weight.solver == made.language.weight.solver == "mse_clip"
    assert (made.vision.weight.granularity, made.language.weight.granularity) == (PerRow(), PerGroup(128))


def test_for_engine__rotations_stay_and_what_runs_online_goes():
    rewrites = for_engine(recipes.mquant(4), ENGINE).rewrites
    assert (rewrites.rotate, rewrites.keep_means) == (True, True)
    assert (rewrites.hadamard, rewrites.suppress) == (False, False)
    scales = for_engine(recipes.awq(4), ENGINE).rewrites
    assert scales == recipes.awq(4).rewrites


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (recipes.rtn(4) | recipes.calibquant(2), r"QuantConfig\.kv .*no ranges by modality"),
        (recipes.resq(kv_bits=None), r"Rewrites\.bases .*one precision"),
        (recipes.quarot(4, 8, kv_bits=4), r"kv_rounding"),
        (recipes.quik(4), r"vision\.dynamic .*8 bits in one part"),
        (recipes.rtn(2, group_size=32), r"vision\.weight\.bits = 2 .*4 or 8"),
        (
            recipes.awq(4, symmetric=False, zero_point="float"),
            r"vision\.weight\.zero_point = 'float' .*'int' for vllm.*whose zero points are codes",
        ),
    ],
)
def test_for_engine__refuses_by_name(config, words):
    with pytest.raises(mmqc.ConfigError, match=words):
        for_engine(config, ENGINE)


def test_for_engine__unknown_engines_and_activations():
    with pytest.raises(ValueError, match="known are"):
        for_engine(recipes.rtn(8), "vllm==0.1")
    with pytest.raises(mmqc.ConfigError, match="float8"):
        for_engine(recipes.rtn(8), ENGINE, activations="int4")


def test_keep_means__needs_folds_and_no_bases():
    rewrites = mmqc.Rewrites(fold_norms=True, rotate=True, keep_means=True)
    with pytest.raises(mmqc.ConfigError, match="keep_means"):
        dataclasses.replace(rewrites, fold_norms=False, rotate=False)
    with pytest.raises(mmqc.ConfigError, match="keep_means"):
        dataclasses.replace(recipes.resq().rewrites, keep_means=True)
