"""``mmqc.plan``: the spaces and what becomes of them, as text; nothing of the model changes; no values are needed."""

import functools
import re

import pytest
import torch
import transformers
from commands import invoke
from models import tiny_qwen2_vl
from small_vlm import check_unchanged, traces
from tiny_families import FAMILIES

import mmqc
from mmqc import recipes

STREAM = """\
space of 96: free, rotated
    written by  model.language_model.embed_tokens.weight  axis 1, 1 x 96
    written by  model.visual.merger.mlp.2.weight  axis 0, 1 x 96
    written by  model.language_model.layers.{0,1}.self_attn.o_proj.weight  axis 0, 1 x 96
    written by  model.language_model.layers.{0,1}.mlp.down_proj.weight  axis 0, 1 x 96
    read by     model.language_model.layers.{0,1}.self_attn.q_proj.weight  axis 1, 1 x 96
    read by     model.language_model.layers.{0,1}.self_attn.k_proj.weight  axis 1, 1 x 96
    read by     model.language_model.layers.{0,1}.self_attn.v_proj.weight  axis 1, 1 x 96
    read by     model.language_model.layers.{0,1}.mlp.gate_proj.weight  axis 1, 1 x 96
    read by     model.language_model.layers.{0,1}.mlp.up_proj.weight  axis 1, 1 x 96
    read by     lm_head.weight  axis 1, 1 x 96
    norm        model.language_model.layers.{0,1}.input_layernorm
    norm        model.language_model.layers.{0,1}.post_attention_layernorm
    norm        model.language_model.norm
"""
HEADS = """\
4 spaces of 16: free, rotated
    written by  model.language_model.layers.{0,1}.self_attn.v_proj.weight  axis 0, 1 x 16
    read by     model.language_model.layers.{0,1}.self_attn.o_proj.weight  axis 1, 3 x 16
"""
HIDDEN = """\
2 spaces of 296: written by an operation, online Hadamard in front of its readers
    made by     mul* in model.language_model.layers.{0,1}.mlp
    read by     model.language_model.layers.{0,1}.mlp.down_proj.weight  axis 1, 1 x 296
"""
PINNED = """\
2 spaces of 296: pinned, left alone
    written by  model.language_model.layers.{0,1}.mlp.gate_proj.weight  axis 0, 1 x 296
    pinned by   silu* in model.language_model.layers.{0,1}.mlp.act_fn: silu does not commute with a rotation
"""


@functools.cache
def planned() -> tuple[mmqc.Planned, str]:
    model, batch = tiny_qwen2_vl()
    found = mmqc.plan(model, recipes.rotate(), batch)
    return found, str(found)


@pytest.mark.parametrize("entry", [STREAM, HEADS, HIDDEN, PINNED])
def test_plan__prints_spaces_with_layers_folded(entry: str) -> None:
    assert entry in planned()[1]


def test_plan__counts_and_passes() -> None:
    found, text = planned()
    assert text.startswith("14 channel spaces rotated, 5 online Hadamards; planned in ")
    assert sum(map(found.is_rotated, found.spaces)) == 14
    assert [r.name for r in found.records][-1] == "assign_scheme"
    assert found.seconds > 0


def test_plan__names_pinned_norms_and_their_reasons() -> None:
    model, batch = FAMILIES["gemma3_text"]()
    text = str(mmqc.plan(model, recipes.rotate(), batch))
    assert "made by     model.layers.{0,1}.post_attention_layernorm.weight  a gain" in text
    assert "pinned by   mul* in model.layers.{0,1}.post_attention_layernorm: a gain per channel is multiplied in" in text


def test_plan__leaves_the_model_as_it_was() -> None:
    model, batch = tiny_qwen2_vl()
    model.train()
    before = traces(model)
    mmqc.plan(model, recipes.mquant(8), batch)
    check_unchanged(model, before)


def test_plan__without_values_says_the_same() -> None:
    model, batch = tiny_qwen2_vl()
    with torch.device("meta"):
        empty = transformers.AutoModelForImageTextToText.from_config(model.config)
    found = mmqc.plan(empty, recipes.mquant(8), batch)
    assert all(p.is_meta for p in empty.parameters())
    assert "suppress_magnitude" not in [r.name for r in found.records]
    spaces = lambda text: text[text.index("space of ") :]  # noqa: E731
    assert spaces(str(found)) == spaces(planned()[1])


def test_plan__of_many_layers_is_as_long_as_of_two() -> None:
    lengths = set()
    for layers in (2, 5):
        config = tiny_qwen2_vl()[0].config
        config.text_config.num_hidden_layers = layers
        config.text_config.layer_types = None
        with torch.device("meta"):
            model = transformers.Qwen2VLForConditionalGeneration(type(config)(**config.to_dict()))
        text = str(mmqc.plan(model, recipes.rotate(), tiny_qwen2_vl()[1]))
        lengths.add(len(text.splitlines()))
    assert "layers.{0..4}.self_attn.v_proj.weight" in text
    assert re.search(r"^10 spaces of 16: free, rotated", text, re.M)
    assert len(lengths) == 1


def test_explain__spaces_on_the_command_line() -> None:
    result = invoke("explain", "digits-vqa", "--spaces")
    assert result.exit_code == 0, result.output
    assert "space of 256: free, rotated" in result.output
    assert "model.language_model.layers.{0..3}.mlp.down_proj.weight  axis 1, 1 x 768" in result.output
