"""A QuantConfig from what was typed."""

import json
import re

import pytest
import typer

import mmqc
from mmqc.cli.config import in_float4, in_float8, make_config, plain_value, read_config


def test_make_config__passes_settings_to_the_recipe():
    config = make_config("mquant", ["weight_bits=8", "msq=false", "solver=rtn"])
    assert config == mmqc.recipes.mquant(weight_bits=8, msq=False, solver="rtn")


def test_make_config__some_towers_of_any_recipe():
    assert make_config("awq", ["towers=language"]) == mmqc.recipes.awq().with_towers("language")
    assert make_config("mquant", ["towers=vision+projector"]) == mmqc.recipes.mquant().with_towers("vision", "projector")


@pytest.mark.parametrize(
    ("recipe", "settings", "names"),
    [
        ("nosuch", [], "mquant"),
        ("mquant", ["bits=4"], "weight_bits"),
        ("mquant", ["weight_bits"], "key=value"),
        ("rtn", ["weight_bits=5"], "WeightSpec.bits"),
        ("rtn", ["towers=text"], "projector"),
    ],
)
def test_make_config__says_what_is_allowed(recipe, settings, names):
    with pytest.raises(typer.BadParameter, match=re.escape(names)):
        make_config(recipe, settings)


def test_read_config__reads_a_config_and_a_report(tmp_path):
    config = mmqc.recipes.mquant(weight_bits=8)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert read_config(path) == config
    path.write_text(json.dumps({"config": config.to_dict(), "layers": []}))
    assert read_config(path) == config


def test_read_config__names_an_unknown_key(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**mmqc.recipes.rtn(8).to_dict(), "no_such_key": 1}))
    with pytest.raises(typer.BadParameter, match="no_such_key"):
        read_config(path)


def test_in_float8__wants_static_activations():
    assert in_float8(mmqc.recipes.mquant(weight_bits=8)).language.activation.type == "float"
    with pytest.raises(typer.BadParameter, match="quantized activations"):
        in_float8(mmqc.recipes.rtn(8))


def test_in_float4__wants_weights_of_4_bits_alone():
    assert str(in_float4(mmqc.recipes.gptq(4), "mxfp4").language) == "W4A16-mxfp4"
    with pytest.raises(typer.BadParameter, match="weights of 4 bits alone"):
        in_float4(mmqc.recipes.mquant(4), "nvfp4")
    with pytest.raises(typer.BadParameter, match="form = 'fp4'"):
        in_float4(mmqc.recipes.gptq(4), "fp4")


def test_plain_value__json_pythons_words_or_a_string():
    values = {"4": 4, "0.5": 0.5, "true": True, "True": True, "None": None, "null": None, "rtn": "rtn"}
    assert {text: plain_value(text) for text in values} == values
