import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchao.quantization.granularity import PerGroup, PerRow, PerTensor

from mmqc import recipes
from mmqc.config import ActivationSpec, ConfigError, QuantConfig, Rewrites, Scheme, WeightSpec

RECIPES = {
    "rotate": recipes.rotate(seed=3),
    "rtn": recipes.rtn(),
    "rtn_w4a8": recipes.rtn(4, 8),
    "rtn_grouped": recipes.rtn(4, group_size=64),
    "mquant": recipes.mquant(),
    "mquant_w4_w8": recipes.mquant(4, vision_weight_bits=8, msq=False),
    "mquant_plain": recipes.mquant(rotate=False, solver="mse_clip"),
    "statistics": recipes.rtn(8, 8).replace(statistics={"linears": {"a.weight": {"input_scale": [0.5]}}}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_config__is_its_own_json(name: str) -> None:
    config = RECIPES[name]
    data = json.loads(json.dumps(config.to_dict()))
    assert QuantConfig.from_dict(data) == config
    assert QuantConfig.from_dict(data).to_dict() == config.to_dict()


granularities = st.just(PerRow()) | st.builds(PerGroup, st.integers(1, 256))
solvers = st.sampled_from(("rtn", "mse_clip", "awq_clip", "gptq"))
weights = st.one_of(
    st.builds(WeightSpec, st.sampled_from((2, 3, 4, 8)), granularities, solvers, act_order=st.booleans()),
    st.builds(
        WeightSpec, st.sampled_from((2, 4)), granularities, solvers, act_order=st.just(False), static_groups=st.booleans(),
        damping=st.floats(0.001, 0.5),
    ),
)  # fmt: skip
activations = st.builds(
    ActivationSpec, per_modality=st.booleans(), observer=st.sampled_from(("minmax", "percentile")),
    percentile=st.floats(0, 1, exclude_min=True),
)  # fmt: skip
schemes = st.none() | st.builds(Scheme, weights, st.none() | activations)
rewrites = st.builds(Rewrites, st.just(True), st.booleans(), st.just(True), st.booleans(), st.integers(0, 2**31))
configs = st.builds(QuantConfig, schemes, schemes, schemes, rewrites, st.lists(st.text(max_size=5)).map(tuple))


@given(configs)
def test_config__any_config_survives_json(config: QuantConfig) -> None:
    again = QuantConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightSpec(5), r"WeightSpec.bits = 5 is not supported; allowed: \(2, 3, 4, 8\)"),
        (lambda: WeightSpec(4, PerTensor()), "WeightSpec.granularity"),
        (lambda: WeightSpec(4, solver="awq"), "WeightSpec.solver = 'awq'"),
        (
            lambda: WeightSpec(4, PerGroup(8), "gptq", static_groups=False),
            "WeightSpec.act_order = True is not supported; allowed: False for groups that are not static",
        ),
        (lambda: WeightSpec(damping=0.0), "WeightSpec.damping = 0.0"),
        (
            lambda: Scheme(WeightSpec(symmetric=False), ActivationSpec()),
            "WeightSpec.symmetric = False is not supported; allowed: True beside quantized activations",
        ),
        (lambda: ActivationSpec(4), "ActivationSpec.bits = 4"),
        (lambda: ActivationSpec(granularity=PerRow()), "ActivationSpec.granularity"),
        (lambda: ActivationSpec(observer="mean"), "ActivationSpec.observer = 'mean'"),
        (lambda: ActivationSpec(percentile=0.0), "ActivationSpec.percentile = 0.0"),
        (lambda: ActivationSpec(percentile=1.5), "ActivationSpec.percentile = 1.5"),
        (
            lambda: Rewrites(rotate=True),
            "Rewrites.fold_norms = False is not supported; allowed: True where rotate is True",
        ),
        (lambda: Rewrites(suppress=True), "Rewrites.hadamard = False"),
        (lambda: QuantConfig.from_dict({"visoin": None}), "unknown key 'visoin' in QuantConfig; known keys:"),
        (lambda: QuantConfig.from_dict({"vision": {"wieght": {}}}), "unknown key 'wieght' in vision"),
        (lambda: QuantConfig.from_dict({"vision": {"weight": {"bit": 4}}}), "unknown key 'bit' in vision.weight"),
        (lambda: QuantConfig.from_dict({"vision": {"weight": {"granularity": "per_x"}}}), "granularity = 'per_x'"),
        (lambda: QuantConfig.from_dict({"version": 99}), "version = 99"),
        (lambda: recipes.rtn(5), "WeightSpec.bits = 5"),
        (lambda: recipes.mquant(activation_bits=4), "ActivationSpec.bits = 4"),
    ],
)
def test_config__errors_name_field_value_and_what_is_allowed(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_config__needs_calibration() -> None:
    wanted = {"rotate", "rtn", "rtn_grouped", "statistics"}
    assert {name for name, config in RECIPES.items() if not config.needs_calibration} == wanted
    assert RECIPES["mquant"].replace(statistics={}).needs_calibration  # gptq solves from data, not from scales


def test_config__shorthand() -> None:
    assert str(recipes.mquant().language) == "W4A8"
    assert str(recipes.rtn(4, group_size=128).vision) == "W4A16-g128"
    assert recipes.mquant(4, vision_weight_bits=8).schemes.keys() == {"vision", "projector", "language"}
    assert str(recipes.mquant(4, vision_weight_bits=8).projector) == "W8A8"
    assert recipes.rotate().schemes == {}


def test_config__mquant_without_rotation_suppresses_nothing() -> None:
    assert recipes.mquant(rotate=False).rewrites == Rewrites()


def test_config__values_do_not_change() -> None:
    config = recipes.rtn()
    with pytest.raises(AttributeError):
        config.keep = ()
    assert config.replace(keep=("a",)).keep == ("a",)
    assert config.keep == ("lm_head",)
