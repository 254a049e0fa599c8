import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchao.quantization.granularity import PerGroup, PerRow, PerTensor

from mmqc import recipes
from mmqc.config import ActivationSpec, Bases, ChannelScales, ConfigError, QuantConfig, Rewrites, Scheme, WeightSpec
from mmqc.specs import DynamicSpec, KVRounding, KVSpec

ON_CODES = recipes.rtn(4, group_size=8, symmetric=False)
BETWEEN = Scheme(WeightSpec(4, PerGroup(8), symmetric=False, zero_point="float"))
RECIPES = {
    "rotate": recipes.rotate(seed=3),
    "rtn": recipes.rtn(),
    "rtn_w4a8": recipes.rtn(4, 8),
    "rtn_grouped": recipes.rtn(4, group_size=64),
    "rtn_zero_points": recipes.rtn(3, group_size=64, symmetric=False, solver="mse_clip"),
    "rtn_float_zero_points": recipes.rtn(2, group_size=64, symmetric=False, solver="mse_clip", zero_point="float"),
    "per_token": recipes.per_token(4, 8, symmetric=True, group_size=128, solver="rtn"),
    "smoothquant": recipes.smoothquant(8, 8, symmetric=True),
    "awq": recipes.awq(duo=True),
    "gptq": recipes.gptq(group_size=64, symmetric=False),
    "mquant": recipes.mquant(),
    "mquant_w4_w8": recipes.mquant(4, vision_weight_bits=8, msq=False),
    "mquant_plain": recipes.mquant(rotate=False, solver="mse_clip"),
    "mquant_fp8": recipes.mquant(8).with_float8(),
    "mquant_grouped": recipes.mquant(solver="rtn", group_size=32).with_integer_scales(512),
    "learned": recipes.learned(steps=50),
    "integer_scale": recipes.integer_scale(),
    "integer_scale_llama3": recipes.integer_scale(preset="llama3"),
    "integer_scale_heuristic": recipes.integer_scale(amplifier="heuristic", per_modality=True),
    "integer_scale_progressive": recipes.integer_scale(amplifier="progressive"),
    "integer_scale_float": recipes.integer_scale(amplifier=None),
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
        WeightSpec,
        st.sampled_from((2, 4)),
        granularities,
        solvers,
        act_order=st.just(False),
        static_groups=st.booleans(),
        damping=st.floats(0.001, 0.5),
    ),
)
activations = st.builds(
    ActivationSpec,
    per_modality=st.booleans(),
    observer=st.sampled_from(("minmax", "percentile")),
    percentile=st.floats(0, 1, exclude_min=True),
)
schemes = st.none() | st.builds(Scheme, weights, st.none() | activations)
rewrites = st.builds(
    Rewrites,
    fold_norms=st.just(True),
    rotate=st.booleans(),
    hadamard=st.just(True),
    suppress=st.booleans(),
    seed=st.integers(0, 2**31),
)
configs = st.builds(QuantConfig, schemes, schemes, schemes, rewrites, st.lists(st.text(max_size=5)).map(tuple))


@settings(max_examples=40)
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
        *((lambda g=g: WeightSpec(4, PerGroup(g)), "WeightSpec.granularity") for g in (0, -3, True, 2.0, "128")),
        (lambda: WeightSpec(4, solver="awq"), "WeightSpec.solver = 'awq'"),
        (
            lambda: WeightSpec(4, PerGroup(8), "gptq", static_groups=False),
            "WeightSpec.act_order = True is not supported; allowed: False for groups that are not static",
        ),
        (lambda: recipes.awq(shared_heads="mean"), "ChannelScales.shared_heads = 'mean'"),
        (lambda: ChannelScales(grid=0), "ChannelScales.grid = 0"),
        (lambda: ChannelScales(at_most=0.0), "ChannelScales.at_most = 0.0"),
        (lambda: recipes.learned(at_most=2.0), "ChannelScales.at_most = 2.0"),
        (lambda: WeightSpec(damping=0.0), "WeightSpec.damping = 0.0"),
        (
            lambda: Scheme(WeightSpec(symmetric=False), ActivationSpec()),
            "WeightSpec.symmetric = False is not supported; allowed: True beside quantized activations",
        ),
        (lambda: WeightSpec(zero_point="half"), r"WeightSpec.zero_point = 'half' .* \('int', 'float'\)"),
        (lambda: WeightSpec(zero_point="float"), "WeightSpec.zero_point = 'float' .* 'float' where symmetric is False"),
        (
            lambda: WeightSpec(4, PerGroup(8), symmetric=False, amplifier=2, zero_point="float"),
            "WeightSpec.zero_point = 'float' .* amplifier is None",
        ),
        (
            lambda: recipes.rtn(4, 8, symmetric=False, zero_point="float"),
            "WeightSpec.symmetric = False is not supported; allowed: True beside quantized activations",
        ),
        (
            lambda: recipes.mquant().replace(language=BETWEEN),
            "Rewrites.suppress = True is not supported; allowed: False beside zero points of type 'float'",
        ),
        (lambda: WeightSpec(4, PerGroup(8), amplifier=1000), "WeightSpec.amplifier = 1000 .* a power of two"),
        (lambda: WeightSpec(4, PerGroup(8), amplifier=0), "WeightSpec.amplifier = 0"),
        (lambda: WeightSpec(4, PerGroup(8), amplifier=True), "WeightSpec.amplifier = True"),
        (lambda: WeightSpec(8, PerGroup(8), amplifier="progressive"), "WeightSpec.bits = 8 .* 2, 3 or 4 where"),
        (lambda: WeightSpec(4, amplifier=1024), r"allowed: PerGroup\(g\) where amplifier is set"),
        (lambda: Scheme(WeightSpec(4, PerGroup(8), amplifier=2)), "Scheme.activation = None"),
        (lambda: recipes.mquant().with_integer_scales(), r"schemes with PerGroup\(g\) weights"),
        (lambda: recipes.integer_scale(preset="llama2"), "preset = 'llama2'"),
        (lambda: ActivationSpec(4), "ActivationSpec.bits = 4"),
        (lambda: ActivationSpec(granularity=PerRow()), "ActivationSpec.granularity"),
        (lambda: ActivationSpec(observer="mean"), "ActivationSpec.observer = 'mean'"),
        (lambda: ActivationSpec(percentile=0.0), "ActivationSpec.percentile = 0.0"),
        (lambda: ActivationSpec(percentile=1.5), "ActivationSpec.percentile = 1.5"),
        (lambda: Rewrites(rotate=True), "Rewrites.fold_norms = False is not supported; allowed: True where rotate is True"),
        (lambda: Rewrites(suppress=True), "Rewrites.hadamard = False"),
        (lambda: Rewrites(tensor_parallel=2), "Rewrites.tensor_parallel = 2 is not supported; allowed: 1 where hadamard is False"),
        (lambda: Rewrites(tensor_parallel=0), "Rewrites.tensor_parallel = 0 is not supported; allowed: at least 1"),
        (lambda: QuantConfig.from_dict({"visoin": None}), "unknown key 'visoin' in QuantConfig; known keys:"),
        (lambda: QuantConfig.from_dict({"vision": {"wieght": {}}}), "unknown key 'wieght' in vision"),
        (lambda: QuantConfig.from_dict({"vision": {"weight": {"bit": 4}}}), "unknown key 'bit' in vision.weight"),
        (lambda: QuantConfig.from_dict({"vision": {"weight": {"granularity": "per_x"}}}), "granularity = 'per_x'"),
        (lambda: QuantConfig.from_dict({"version": 99}), "version = 99"),
        (lambda: recipes.rtn(5), "WeightSpec.bits = 5"),
        (lambda: recipes.rtn(8, 8, symmetric=False), "WeightSpec.symmetric = False is not supported; allowed: True beside"),
        (lambda: recipes.per_token(4, 4, symmetric=True), "ActivationSpec.bits = 4"),
        (lambda: recipes.per_token(4, 8, group_size=128), "Scheme.dynamic = .* allowed: None beside .* groups"),
        (lambda: recipes.mquant(activation_bits=4), "ActivationSpec.bits = 4"),
    ],
)
def test_config__errors_name_field_value_and_what_is_allowed(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_config__needs_calibration() -> None:
    wanted = {"rotate", "rtn", "rtn_grouped", "rtn_zero_points", "rtn_float_zero_points", "per_token", "statistics"}
    assert {name for name, config in RECIPES.items() if not config.needs_calibration} == wanted
    assert RECIPES["mquant"].replace(statistics={}).needs_calibration  # gptq solves from data, not from scales


def test_config__down_is_the_language_models() -> None:
    config = recipes.integer_scale(preset="llama3")
    assert str(config.scheme("language", "down")) == "W8A8-g128-i8192"
    assert {str(config.scheme(t, r)) for t, r in (("vision", "down"), ("language", "out"))} == {"W4A8-g128-i8192"}
    assert config.replace(language=None).scheme("language", "down") is None
    assert recipes.integer_scale().scheme("language", "down") == recipes.integer_scale().language


def test_recipes__a_symmetric_scale_per_token_is_that_of_static_recipes_made_dynamic() -> None:
    for bits, group_size in ((8, None), (4, 128)):
        made = recipes.per_token(bits, 8, symmetric=True, group_size=group_size, solver="rtn").schemes["language"]
        static = recipes.rtn(bits, 8, group_size).with_token_scales().schemes["language"]
        assert (made.activation, made.weight.granularity) == (static.activation, static.weight.granularity)
        assert str(made) == str(static)
    assert recipes.smoothquant(8, 8, symmetric=True).rewrites.smooth == 0.5


def test_config__where_zero_lies_says_what_a_weight_takes() -> None:
    kinds = {"symmetric": {}, "int": {"symmetric": False}, "float": {"symmetric": False, "zero_point": "float"}}
    specs = {kind: WeightSpec(2, PerGroup(32), **options) for kind, options in kinds.items()}
    assert {kind: spec.bits_with_scales for kind, spec in specs.items()} == {"symmetric": 3.0, "int": 3.25, "float": 3.5}
    assert str(BETWEEN) == "W4A16-g8-asym-float"
    made = recipes.gptq(4, 128, symmetric=False, zero_point="float").with_float4("mxfp4")
    assert (made.language.weight.symmetric, made.language.weight.zero_point) == (True, "int")
    for recipe in (recipes.rtn, recipes.gptq, recipes.awq, recipes.learned):
        assert recipe(2, group_size=64, symmetric=False, zero_point="float").language.weight.zero_point == "float"
    old = ON_CODES.to_dict()
    for place in ("vision", "language"):
        del old[place]["weight"]["zero_point"]
    assert QuantConfig.from_dict(old) == ON_CODES  # as it was saved before there was a choice


def test_config__shorthand() -> None:
    assert str(recipes.integer_scale(amplifier="heuristic").language) == "W4A8-g128-iheuristic"
    assert str(recipes.mquant().language) == "W4A8"
    assert str(recipes.rtn(4, group_size=128).vision) == "W4A16-g128"
    assert recipes.mquant(4, vision_weight_bits=8).schemes.keys() == {"vision", "projector", "language"}
    assert str(recipes.mquant(4, vision_weight_bits=8).projector) == "W8A8"
    assert recipes.rotate().schemes == {}


def test_config__mquant_without_rotation_suppresses_nothing() -> None:
    assert recipes.mquant(rotate=False).rewrites == Rewrites()
    assert recipes.for_engine(recipes.mquant(tensor_parallel=8), "vllm==0.33").rewrites.tensor_parallel == 1


def test_config__values_do_not_change() -> None:
    config = recipes.rtn()
    with pytest.raises(AttributeError):
        config.keep = ()
    assert config.replace(keep=("a",)).keep == ("a",)
    assert config.keep == ("lm_head",)


def test_with_towers__the_others_stay_floats():
    config = recipes.resq(4).replace(head=recipes.rtn(8).language)
    text, page = config.with_towers("language"), config.with_towers("vision", "projector")
    assert text == config.replace(vision=None, projector=None)
    assert {*text.schemes} == {"language", "head"}
    assert {*page.schemes} == {"vision", "projector"}
    assert page.kv_rounding is None
    assert page.rewrites == text.rewrites == config.rewrites
    assert (recipes.rtn(8) | recipes.calibquant(2)).with_towers("vision").kv is None
    for towers in ((), ("text",), ("vision", "text")):
        with pytest.raises(ConfigError, match="'vision', 'projector', 'language'"):
            config.with_towers(*towers)
    with pytest.raises(ConfigError, match="which this quantizes"):
        text.with_towers("vision")


NOT_OF = {"bool": 1, "int": 2.5, "float": True, "str": 5, "int | None": True, "float | None": "x", "WeightSpec": "rtn"}
NOT_OF |= {"Scheme | None": recipes.rtn(), "ActivationSpec | None": 8, "Rewrites": {}, "KVSpec | None": 2}
SPECS = (Scheme, Rewrites, QuantConfig, WeightSpec, ActivationSpec, DynamicSpec, ChannelScales, Bases, KVRounding, KVSpec)


@pytest.mark.parametrize("spec", SPECS)
def test_wrong_types__are_named_where_a_config_is_made(spec: type) -> None:
    """Before they are compared with anything, and long before a file is written."""
    fields = [f for f in dataclasses.fields(spec) if f.type in NOT_OF]
    assert fields
    for field in fields:
        for value in ([1], NOT_OF[str(field.type)]):
            with pytest.raises(ConfigError, match=rf"{spec.__name__}\.{field.name} = .* is not supported; allowed: \w+"):
                spec(**{field.name: value})


def test_keep__is_a_tuple_of_patterns() -> None:
    for keep in ("lm_head", (5,), ["a", None]):
        with pytest.raises(ConfigError, match=r"QuantConfig\.keep = .*allowed: a tuple of patterns"):
            QuantConfig(keep=keep)
