"""Checkpoints in the compressed-tensors format: packed as that package packs, loaded by transformers' own path."""

import copy
import json

import pytest
import torch
from foreign_checkpoints import loaded_by_transformers
from models import tiny_qwen2_vl
from often import often
from tolerance import assert_close
from torch import nn
from torchao.quantization.granularity import PerGroup
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc import recipes
from mmqc.checkpoint.compressed_tensors import pack_words, unpack_words
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import QuantLinear

theirs = pytest.importorskip("compressed_tensors", reason="pip install 'mmqc[formats]' to read what mmqc writes")


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [1, 17, 64, 100])
def test_pack__equals_the_packages_own(bits, width):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, width), dtype=torch.int8)
    words = pack_words(codes, bits)
    assert torch.equal(words, pack_to_int32(codes, bits))
    assert torch.equal(unpack_words(words, width, bits), codes)


PLAIN = dict(msq=False, rotate=False, suppress=False, solver="rtn")
ASYMMETRIC = mmqc.Scheme(mmqc.WeightSpec(4, PerGroup(8), symmetric=False))
SCHEMES = {
    "W4A16-g8 with zero points": mmqc.QuantConfig(ASYMMETRIC, ASYMMETRIC, ASYMMETRIC),
    "W4A16-g8": recipes.rtn(4, group_size=8),
    "W4A16": recipes.rtn(4),
    "W8A16": recipes.rtn(8),
    "W8A8": recipes.rtn(8, activation_bits=8),
    "W4A8": recipes.mquant(4, **PLAIN),
    "W8A8-fp8": recipes.rtn(8, activation_bits=8).with_float8(),
    "W4A8-fp8": recipes.mquant(4, **PLAIN).with_float8(),
    "mixed": recipes.mquant(4, vision_weight_bits=8, **PLAIN).replace(projector=mmqc.Scheme(mmqc.WeightSpec(4))),
}


@pytest.mark.parametrize(
    "config", often(SCHEMES.values(), *map(SCHEMES.get, ("W4A16-g8 with zero points", "W8A8", "mixed"))), ids=SCHEMES
)
def test_save__transformers_computes_the_same_logits(tmp_path, config):
    # in float64 no activation comes to lie on the other side of a rounding boundary
    model, inputs = tiny_qwen2_vl()
    for p in model.parameters():
        p.data = p.data.double()
    inputs["pixel_values"] = inputs["pixel_values"].double()
    mmqc.quantize_(model, config, [inputs] if config.needs_calibration else None, progress=False)
    want, before = logits(model, inputs), model.config.quantization_config
    mmqc.save_pretrained(model, tmp_path, format="compressed-tensors")
    assert model.config.quantization_config is before
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "compressed-tensors"
    assert "lm_head" in saved["ignore"]
    again = loaded_by_transformers(tmp_path)
    assert again.hf_quantizer.quantization_config.quant_method == "compressed-tensors"
    assert not any(isinstance(m, QuantLinear) for m in again.modules())
    compressed = sum(hasattr(m, "quantization_scheme") for m in again.modules())
    assert compressed == sum(isinstance(m, QuantLinear) for m in model.modules())
    assert_close(logits(again, inputs), want)


BY_TOKEN = {
    "W8A8-token": recipes.rtn(8, activation_bits=8).with_token_scales(),
    "W8A8-token, smooth": recipes.smoothquant(8, 8, symmetric=True, solver="rtn"),
    "W8A8-fp8-token": recipes.rtn(8, activation_bits=8).with_token_scales().with_float8(),
    "W4A8-g8-token": recipes.per_token(4, 8, symmetric=True, group_size=8, solver="rtn"),
    "W4A8-g8-fp8-token": recipes.rtn(4, activation_bits=8, group_size=8).with_token_scales().with_float8(),
}


@pytest.mark.parametrize(
    "name", often(["W4A16-g8", "W8A8", "W8A8-fp8", "W4A8-fp8", *BY_TOKEN], "W4A16-g8", "W8A8", "W4A8-g8-fp8-token")
)
def test_save__comes_back_by_our_own_reader(tmp_path, name):
    model, inputs = tiny_qwen2_vl()
    mmqc.quantize_(model, (SCHEMES | BY_TOKEN)[name], [inputs], progress=False)
    mmqc.save_pretrained(model, tmp_path, format="compressed-tensors")
    again = mmqc.load_quantized(tmp_path)
    assert {m.scheme for m in again.modules() if isinstance(m, PackedLinear)} == {name.removesuffix(", smooth")}
    assert torch.equal(logits(again, inputs), logits(model, inputs))


def test_save__bfloat16_rounds_the_scales_and_nothing_else(tmp_path):
    model, inputs = tiny_qwen2_vl()
    for p in model.parameters():
        p.data = p.data.bfloat16()
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    mmqc.quantize_(model, recipes.rtn(4, group_size=8), progress=False)
    mmqc.save_pretrained(model, tmp_path, format="compressed-tensors", max_shard_size="100KB")
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.weight_scale = module.weight_scale.bfloat16().float()
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    logits(again, inputs)  # decompresses
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            assert torch.equal(again.get_submodule(name).weight, module.weight), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"msq": True}, r"one input scale per modality: quantize with msq=False"),
        ({"rotate": True}, r"rotate=False"),
        ({"rotate": True, "suppress": True}, r"format='mmqc'"),
        ({"weight_bits": 2}, r"weights of 2 bits: quantize to 4 or 8"),
    ],
    ids=["modality", "hadamard", "outliers", "bits"],
)
def test_save__refuses_what_the_format_cannot_say(tmp_path, change, words):
    model, inputs = tiny_qwen2_vl()
    mmqc.quantize_(model, recipes.mquant(**(PLAIN | change)), [inputs], progress=False)
    with pytest.raises(mmqc.FormatError, match=words):
        mmqc.save_pretrained(model, tmp_path / "out", format="compressed-tensors")
    assert not (tmp_path / "out").exists()


def test_save__zero_points_between_the_codes_go_into_our_own_format_alone(tmp_path):
    model, inputs = tiny_qwen2_vl()
    config = recipes.rtn(4, group_size=8, symmetric=False, solver="mse_clip", zero_point="float")
    mmqc.quantize_(model, config, progress=False)
    with pytest.raises(mmqc.FormatError, match=r"zero points between the codes.*zero_point='int'(.|\n)*format='mmqc'"):
        mmqc.save_pretrained(model, tmp_path / "out", format="compressed-tensors")
    assert not (tmp_path / "out").exists()
    want = logits(model, inputs)
    mmqc.save_pretrained(model, tmp_path)
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(tmp_path), inputs), want)


@pytest.mark.parametrize("saved", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asked", [torch.float16, torch.bfloat16, torch.float32])
def test_save__zero_points_between_the_codes_come_back_as_they_were(tmp_path, saved, asked):
    model, _ = tiny_qwen2_vl()
    mmqc.quantize_(model.to(saved), recipes.rtn(2, group_size=8, symmetric=False, zero_point="float"), progress=False)
    mmqc.save_pretrained(model, tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=asked)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    assert linears
    for name, linear in linears.items():
        other = again.get_submodule(name)
        assert other.weight_zero.dtype == torch.float16, name
        assert torch.equal(other.weight_zero, linear.weight_zero), name
        assert torch.equal(other.weight_scale, linear.weight_scale), name


def test_save__refuses_buffers_that_the_format_has_no_place_for(tmp_path):
    model, _ = tiny_qwen2_vl()
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    linear = model.model.language_model.layers[1].mlp.up_proj
    linear.register_buffer("group_scale", torch.zeros(296, dtype=torch.int32), persistent=False)
    with pytest.raises(mmqc.FormatError, match=r"layers\.1\.mlp\.up_proj holds group_scale.*float scales"):
        mmqc.save_pretrained(model, tmp_path / "out", format="compressed-tensors")


def test_save__by_default_in_our_own_format_and_never_an_unquantized_model(tmp_path):
    model, inputs = tiny_qwen2_vl()
    with pytest.raises(ValueError, match="no linear that mmqc quantized"):
        mmqc.save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="'mmqc' or 'compressed-tensors'"):
        mmqc.save_pretrained(model, tmp_path, format="gguf")
    mmqc.quantize_(model, recipes.rtn(8), progress=False)
    want = logits(copy.deepcopy(model), inputs)
    assert mmqc.save_pretrained(model, tmp_path) == tmp_path
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(tmp_path), inputs), want)
    assert nn.Linear in {type(m) for m in model.modules()}
