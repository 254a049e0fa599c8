"""Names: what vLLM's classes make of them, and which linears they join."""

import pytest

from mmqc.engines.names import joined, matches, renamed, renamed_target, split_by_rows, target_of
from mmqc.engines.table import read_table, versions

QWEN = read_table("0.33")["models"]["Qwen2VLForConditionalGeneration"]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"),
        ("model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"),  # as files have it
        ("model.visual.blocks.1.attn.qkv", "visual.blocks.1.attn.qkv"),
        ("visual.blocks.1.attn.qkv", "visual.blocks.1.attn.qkv"),
        ("language_model.model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"),
    ],
)
def test_renamed__old_and_new_names_become_the_engines(name, theirs):
    assert renamed(name, QWEN) == theirs


def test_renamed__by_every_kind_of_rule():
    model = {
        "renaming": {"regex": [["^a(\\d)", "b\\1"]], "substr": [[".x.", ".y."]], "prefix": [["b1", "c1"]], "suffix": [["z", "w"]]}
    }
    assert renamed("a1.x.z", model) == "c1.y.w"
    assert renamed("a1.x.z", None) == "a1.x.z"


def test_renamed_target__patterns_and_classes_stay():
    assert renamed_target("re:model.visual.*", QWEN) == "re:model.visual.*"
    assert renamed_target("Linear", QWEN) == "Linear"
    assert renamed_target("model.visual.merger.mlp.0", QWEN) == "visual.merger.mlp.0"


def test_joined__q_k_v_and_gate_up_in_the_engines_order():
    names = [
        f"m.layers.0.{n}" for n in ("self_attn.v_proj", "self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.gate_proj")
    ]
    found = joined([*names, "m.layers.0.mlp.down_proj", "visual.blocks.0.attn.qkv"], QWEN)
    assert {whole: [n.rpartition(".")[2] for n in of] for whole, of in found.items()} == {
        "m.layers.0.self_attn.qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "m.layers.0.mlp.gate_up_proj": ["gate_proj", "up_proj"],
        "m.layers.0.mlp.down_proj": ["down_proj"],
        "visual.blocks.0.attn.qkv": ["qkv"],
    }


def test_target_of__names_before_classes():
    assert target_of("a.b.down_proj", ["Linear", "re:.*down_proj$"]) == "re:.*down_proj$"
    assert target_of("a.b.up_proj", ["Linear", "re:.*down_proj$"]) == "Linear"
    assert target_of("a.b.up_proj", ["a.b.down_proj"]) is None
    assert matches("a.b", "re:a")  # a pattern is matched from the front
    assert not matches("b.a", "re:a")


def test_split_by_rows__what_writes_the_stream():
    assert [split_by_rows(n) for n in ("a.o_proj", "a.qkv_proj", "visual.blocks.0.mlp.fc2", "m.gate_up_proj")] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("version", versions())
def test_tables__every_class_renames_its_own_vision_and_language_apart(version):
    for name, model in read_table(version)["models"].items():
        if model is None or ("Vision" not in name and "VL" not in name):
            continue
        towers = {renamed(f"model.{part}.x", model) for part in ("language_model", "visual", "vision_tower")}
        assert len(towers) == 3, name
