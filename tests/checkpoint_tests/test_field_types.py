"""A wrong type in quantization_config is an error that names its key."""

import pytest

from mmqc import recipes
from mmqc.checkpoint.checksum import CheckpointError
from mmqc.checkpoint.hf import MmqcConfig
from mmqc.checkpoint.module_spec import build_module

CONFIG = recipes.mquant(4).to_dict()
NORM = {"kind": "rms_norm", "size": 7, "eps": 1e-5, "weight": True, "bias": False, "dtype": "float32"}
LINEAR = {
    **{"kind": "quant_linear", "in": 12, "out": 5, "weight_bits": 4, "group_size": 4, "hadamard": True, "bias": True},
    **{"activation_bits": None, "integer_scales": False, "input_scales": 0, "outliers": 0, "zero": True, "float8": False},
    **{"modality": False, "dtype": "bfloat16"},
}
WRONG = {
    "config": [5, "x", [1], {"keep": 5}, {"keep": [5]}, {"vision": 5}, {"rewrites": 5}, {"kv": [1]}, {"vision": {"weight": 5}}],
    "modules": [5, [], {"a": 5}, {"a": NORM | {"size": "7"}}, {"a": NORM | {"weight": "yes"}}, {"a": NORM | {"dtype": 5}}],
    "parameters": [5, {"a": 5}, {"a": {"shape": 5, "dtype": "float32"}}, {"a": {"shape": [1], "dtype": 5}}, {"a": {"shape": [1]}}],
    "dtype": [5, ["float32"]],
    "untied": [1, "no"],
    "visual_token_ids": [5, "55", {"a": 1}, ["5"], [True]],
    "record": [5, {"passes": 5}, {"passes": [5]}, {"unseen": "a"}, {"unseen": [5]}],
    "hashes": [5, ["a"], {"a": 5}],
    "version": ["2", 0, True, None, [2]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_wrong_type__is_named(key, value):
    with pytest.raises(ValueError, match=rf"quantization_config\.{key}|unknown key|{key} = "):
        MmqcConfig.from_dict({"quant_method": "mmqc", key: value})


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (
            ("vision", "weight", "symmetric"),
            "yes",
            r"vision\.weight: WeightSpec\.symmetric = 'yes' is not supported; allowed: bool",
        ),
        (("vision", "weight", "bits"), "4", r"WeightSpec\.bits = '4'"),
        (("rewrites", "hadamard"), 1, r"rewrites: Rewrites\.hadamard = 1 is not supported; allowed: bool"),
        (("vision", "weight", "damping"), "x", r"quantization_config\.config: vision.*damping = 'x' .*allowed: float or int"),
    ],
)
def test_config__wrong_types_deep_inside_are_named(place, value, words):
    config = recipes.mquant(4).to_dict()
    part = config
    for name in place[:-1]:
        part = part[name]
    assert place[-1] in part
    part[place[-1]] = value
    with pytest.raises(ValueError, match=words):
        MmqcConfig(config=config)


@pytest.mark.parametrize("name", [name for name in dir(recipes) if name in ("rtn", "mquant", "awq", "resq", "calibquant", "quik")])
def test_recipes__have_the_types_that_they_declare(name):
    config = getattr(recipes, name)()
    assert MmqcConfig(config=config).quant_config == config


@pytest.mark.parametrize("spec", [NORM, LINEAR], ids=lambda spec: spec["kind"])
def test_spec__unknown_keys_and_wrong_types_are_named(spec):
    build_module(spec)
    with pytest.raises(CheckpointError, match=r"here: the spec of a \w+ has an unknown key 'surprise'"):
        build_module(spec | {"surprise": 1}, where="here")
    for key in spec.keys() - {"kind"}:
        with pytest.raises(CheckpointError, match=rf"here\.{key} = "):
            build_module(spec | {key: [object]}, where="here")
    with pytest.raises(CheckpointError, match=r"here\.dtype = 'nn' is no dtype"):
        build_module(spec | {"dtype": "nn"}, where="here")
    with pytest.raises(CheckpointError, match=r"unknown kind of module None"):
        build_module({k: v for k, v in spec.items() if k != "kind"})


def test_spec__what_cannot_be_built_says_where():
    with pytest.raises(CheckpointError, match="here: no quant_linear can be built"):
        build_module(LINEAR | {"out": -5}, where="here")
