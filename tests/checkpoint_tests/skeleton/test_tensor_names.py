"""Families whose checkpoints have q, k and v as one tensor, permuted: quantized, they are saved and load to the bit."""

import dataclasses
import json

import pytest
import torch
import transformers
from models import randomise, text_with_images
from safetensors import safe_open

import mmqc
from mmqc import recipes
from mmqc.checkpoint import hf, save
from mmqc.checkpoint.foreign_weights import ForeignError
from mmqc.checkpoint.save import FormatError
from mmqc.checkpoint.skeleton.tensor_names import come_back, joined, loaded

WHOLE = "vision_tower.encoder.blocks.0.wqkv.weight"
PART = "model.vision_tower.layers.0.attn.q_proj.weight"


def tiny_kimi():
    """Kimi-K2.5 with dense layers: its vision tower's q, k and v are joined and permuted."""
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
    text = {"model_type": "deepseek_v3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 108, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "max_position_embeddings": 128}
    vision = {"hidden_size": 64, "intermediate_size": 108, "num_hidden_layers": 1, "num_attention_heads": 4, "patch_size": 8}
    vision |= {"pos_emb_height": 6, "pos_emb_width": 6, "pos_emb_time": 2}
    config = transformers.Kimi_K25Config(
        vision_config=vision,
        text_config={**text, **latent, "pad_token_id": 0, "eos_token_id": 2},
        projection_hidden_size=64,
        image_token_id=500,
        video_token_id=501,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = randomise(transformers.AutoModelForImageTextToText.from_config(config).float().eval())
    inputs = text_with_images([6])
    del inputs["mm_token_type_ids"]
    pixels = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return model, {**inputs, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 6]])}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


def quantized(config, keep=()):
    model, inputs = tiny_kimi()
    config = dataclasses.replace(config, keep=keep)
    mmqc.quantize_(model, config, [inputs], progress=False)
    return model, inputs


def names_in(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return set(file.keys())


def own_names(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"].get("own_names", False)


RECIPES = {
    "static": recipes.mquant(weight_bits=8, solver="rtn"),
    "packed": recipes.rtn(4, group_size=4),
    "dynamic": recipes.per_token(8, 8, symmetric=True, solver="rtn"),
}


@pytest.mark.parametrize("config", RECIPES.values(), ids=RECIPES)
def test_own_names__where_an_operation_would_take_codes_or_scales(tmp_path, config):
    model, inputs = quantized(config)
    want = logits(model, inputs)
    model.save_pretrained(tmp_path / "a")
    assert own_names(tmp_path / "a")
    assert names_in(tmp_path / "a") == set(model.state_dict())
    again = type(model).from_pretrained(tmp_path / "a")
    assert torch.equal(logits(again, inputs), want)
    again.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "b"), inputs), want)
    base = transformers.AutoModel.from_pretrained(tmp_path / "a")
    assert torch.equal(
        base.vision_tower.layers[0].attn.q_proj.weight_scale, model.model.vision_tower.layers[0].attn.q_proj.weight_scale
    )


@pytest.mark.parametrize("keep", [("*vision_tower*",), ("*.k_proj",)], ids=["the tower", "a third of the joined weight"])
def test_own_names__where_nothing_is_in_the_way_the_family_s(tmp_path, keep):
    model, inputs = quantized(RECIPES["packed"], keep)
    model.save_pretrained(tmp_path)
    assert own_names(tmp_path) is (keep == ("*.k_proj",))
    assert (WHOLE in names_in(tmp_path)) is (keep == ("*vision_tower*",))
    assert torch.equal(logits(type(model).from_pretrained(tmp_path), inputs), logits(model, inputs))


def test_own_names__as_asked_and_as_older_checkpoints_are(tmp_path, monkeypatch):
    model, inputs = quantized(RECIPES["packed"], ("*vision_tower*",))
    model.save_pretrained(tmp_path / "asked", save_original_format=False)
    assert own_names(tmp_path / "asked")
    assert names_in(tmp_path / "asked") == set(model.state_dict())
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "asked"), inputs), logits(model, inputs))

    model, inputs = quantized(RECIPES["dynamic"])
    monkeypatch.setattr(hf, "come_back", lambda *_: True)
    model.save_pretrained(tmp_path / "old")
    assert WHOLE.replace("weight", "qweight") in names_in(tmp_path / "old")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "old"), inputs), logits(model, inputs))


def test_names__that_transformers_writes_and_reads():
    model, _ = tiny_kimi()
    names = set(model.state_dict())
    assert come_back(model, names, ())
    assert not come_back(model, names, [PART])
    assert not come_back(model, names - {PART}, ())  # the operation lacks a third
    assert joined(model, [PART, "lm_head.weight"]) == {PART: WHOLE}
    found = {key: (name, taken) for key, name, taken in loaded(model, [WHOLE, "language_model.lm_head.weight"], names)}
    assert found == {WHOLE: (PART, True), "language_model.lm_head.weight": ("lm_head.weight", False)}


def test_other_formats__refuse_a_linear_that_is_a_part_of_another(tmp_path, monkeypatch):
    model, _ = quantized(RECIPES["dynamic"])
    with pytest.raises(FormatError, match=r"layers\.0\.attn\.k_proj, .*attn\.v_proj: joined.* to .*wqkv\.weight"):
        mmqc.save_pretrained(model, tmp_path / "a", format="compressed-tensors")
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr(save, "_joined", lambda _: [])
    mmqc.save_pretrained(model, tmp_path / "b", format="compressed-tensors")
    with pytest.raises(ForeignError, match=r"blocks\.0\.wqkv, which transformers joins.*layers\.0\.attn\.q_proj"):
        mmqc.load_quantized(tmp_path / "b")

    model, inputs = quantized(RECIPES["dynamic"], ("*vision_tower*",))
    mmqc.save_pretrained(model, tmp_path / "c", format="compressed-tensors")
    assert torch.equal(logits(mmqc.load_quantized(tmp_path / "c"), inputs), logits(model, inputs))
