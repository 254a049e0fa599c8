"""What vLLM has a place for, decided without it."""

import importlib
import importlib.util
import tomllib

import pytest
from source_tree import ROOT

import mmqc
import mmqc.vllm
from mmqc import recipes
from mmqc.checkpoint.module_spec import module_spec
from mmqc.vllm.specs import PluginError, check, joined, parts_of

LINEAR = {
    "kind": "quant_linear",
    "in": 64,
    "out": 32,
    "weight_bits": 4,
    "activation_bits": None,
    "group_size": 0,
    "hadamard": False,
}
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def settings(**modules):
    return {"version": 2, "modules": {name.replace("_at_", "."): spec for name, spec in modules.items()}, "config": {}}


def test_check__takes_linears_norms_and_what_stays_float():
    check(settings(a=LINEAR, b={"kind": "rms_norm"}, c={"kind": "plain_linear"}, d={"kind": "hadamard_linear"}))


@pytest.mark.parametrize("kind", ["quant_experts", "kv_rounder", "query_moment", "adapted_linear", "of_tomorrow"])
def test_check__refuses_other_kinds_by_name(kind):
    with pytest.raises(PluginError, match=rf"layer\.experts is a .*{kind}.*(quantize|serve|merge|update)"):
        check(settings(a=LINEAR, layer_at_experts={"kind": kind}))


def test_check__refuses_a_cache_by_modality_and_new_parameters():
    with pytest.raises(PluginError, match="KV cache by modality"):
        check({**settings(a=LINEAR), "config": {"kv": {"bits": 2}}})
    with pytest.raises(PluginError, match=r"conv\.bias.*rotate=False"):
        check({**settings(a=LINEAR), "parameters": {"conv.bias": {"shape": [4], "dtype": "float32"}}})


def test_check__refuses_names_that_the_engine_does_not_ask_for():
    check({**settings(a=LINEAR), "own_names": False})
    with pytest.raises(PluginError, match=r"own_names.*family.*compressed-tensors"):
        check({**settings(a=LINEAR), "own_names": True})


@pytest.mark.parametrize("found", [{}, {"version": 9, "modules": {"a": LINEAR}}, {"version": 2, "modules": {}}])
def test_check__refuses_layouts_that_it_cannot_read(found):
    with pytest.raises(PluginError, match=r"update it|save_pretrained"):
        check(found)


def test_parts__are_those_that_the_engine_joins_in_its_order():
    names = {f"l.{p}_proj": LINEAR for p in "vkq"}
    assert parts_of("l.qkv_proj", PACKED, names) == ["l.q_proj", "l.k_proj", "l.v_proj"]
    assert parts_of("l.o_proj", PACKED, names) == []
    assert parts_of("l.q_proj", PACKED, names) == ["l.q_proj"]
    assert parts_of("l.q_proj", PACKED, {"l.q_proj": {"kind": "plain_linear"}}) == []


def test_parts__some_in_floating_point_are_refused_by_name():
    with pytest.raises(PluginError, match=r"l\.qkv_proj in one product, and of its parts l\.k_proj is not quantized.*alike"):
        parts_of("l.qkv_proj", PACKED, {"l.q_proj": LINEAR, "l.v_proj": LINEAR})


def test_joined__adds_outputs_and_takes_the_wider_integers():
    other = {**LINEAR, "out": 8, "integer_scales": "int8"}
    assert joined("x", [{**LINEAR, "integer_scales": True}, other]) == {**LINEAR, "out": 40, "integer_scales": True}
    assert joined("x", [other, other])["integer_scales"] == "int8"
    assert joined("x", [LINEAR])["out"] == 32


def test_joined__parts_that_differ_are_refused_by_key():
    with pytest.raises(PluginError, match="differ in weight_bits: 4 and 8"):
        joined("x", [LINEAR, {**LINEAR, "weight_bits": 8}])


def test_check__takes_what_our_recipes_make_of_the_sample():
    sample = mmqc.samples.load("digits-vqa")
    mmqc.quantize_(sample.model, recipes.mquant(4, solver="rtn"), sample.calibration(1), progress=False)
    specs = {name: spec for name, m in sample.model.named_modules() if (spec := module_spec(m))}
    check({"version": 2, "modules": specs, "config": {}})
    kinds = {name: spec["kind"] for name, spec in specs.items()}
    assert set(kinds.values()) == {"quant_linear", "rms_norm"}


def test_plug_in__is_found_by_its_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["mmqc"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="there is a vLLM")
def test_plug_in__without_vllm_says_so():
    with pytest.raises(ImportError, match="vllm"):
        mmqc.vllm.register()
