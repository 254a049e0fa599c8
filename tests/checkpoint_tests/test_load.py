"""Checkpoints in the layouts of AutoAWQ, GPTQModel and compressed-tensors become mmqc's linears, weight by weight."""

import functools
import json

import pytest
import torch
from foreign_checkpoints import awq, gptq, write
from models import tiny_qwen2_vl
from safetensors.torch import load_file, save_file
from tolerance import assert_close
from transformers import AutoModelForImageTextToText

import mmqc
from mmqc import recipes
from mmqc.checkpoint.foreign_weights import ForeignError
from mmqc.nn.linear import QuantLinear


def language(name):
    return "language_model" in name


CASES = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}, awq, 4, 8, False),
    "awq symmetric": ({"quant_method": "awq", "bits": 4, "group_size": 8}, awq, 4, 8, True),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": False}, gptq, 4, 8, False),
    "gptq symmetric": ({"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True}, gptq, 4, 8, True),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "gptq_v2"},
        functools.partial(gptq, v2=True),
        4,
        8,
        False,
    ),
    "gptq 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, gptq, 8, 0, True),
    "gptq 2 bits": ({"quant_method": "gptq", "bits": 2, "group_size": 8}, gptq, 2, 8, False),
}


@torch.no_grad()
def logits(model, inputs):
    return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize(("settings", "pack", "bits", "group", "symmetric"), CASES.values(), ids=CASES)
def test_load__the_weights_that_the_file_stands_for(tmp_path, settings, pack, bits, group, symmetric):
    model, inputs = tiny_qwen2_vl()
    wanted = language if bits > 2 else lambda name: "self_attn" in name  # 16 codes a word, and the MLP is 296 wide
    write(model, tmp_path, settings, pack, bits=bits, group=group, symmetric=symmetric, wanted=wanted)
    again = mmqc.load_quantized(tmp_path)
    linears = {n: m for n, m in again.named_modules() if isinstance(m, QuantLinear)}
    assert set(linears) == {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and wanted(n)}
    for name, module in linears.items():
        assert torch.equal(module.weight, model.get_submodule(name).weight), name
        assert module.group_size == group
        assert module.weight_bits == bits if symmetric else module.weight_bits <= bits + 1
    assert_close(logits(again, inputs), logits(model, inputs))


def test_load__keeps_and_compiles_like_any_other(tmp_path):
    model, inputs = tiny_qwen2_vl()
    settings, pack, bits, group, symmetric = CASES["awq"]
    write(model, tmp_path / "a", settings, pack, bits=bits, group=group, symmetric=symmetric, wanted=language)
    again = mmqc.load_quantized(tmp_path / "a", dtype=torch.bfloat16, device_map="cpu")
    linear = again.model.language_model.layers[0].self_attn.q_proj
    assert (linear.weight_scale.dtype, linear.bias.dtype) == (torch.float32, torch.bfloat16)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    want = logits(again, inputs)
    again.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "b"), inputs), want)


def test_load__what_we_wrote_as_compressed_tensors(tmp_path):
    model, inputs = tiny_qwen2_vl()
    static = recipes.mquant(4, vision_weight_bits=8, msq=False, rotate=False, suppress=False, solver="rtn")
    for name, config in {"g8": recipes.rtn(4, group_size=8), "static": static}.items():
        model, inputs = tiny_qwen2_vl()
        mmqc.quantize_(model, config, [inputs] if config.needs_calibration else None, progress=False)
        mmqc.save_pretrained(model, tmp_path / name, format="compressed-tensors")
        again = mmqc.load_quantized(tmp_path / name)
        assert torch.equal(logits(again, inputs), logits(model, inputs))


def spoil(directory, **changes):
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {k: f(tensors[k]) for k, f in changes.items()}, directory / "model.safetensors")


def test_load__refuses_by_name_what_it_cannot_represent(tmp_path):
    model, _ = tiny_qwen2_vl()
    settings, pack, bits, group, symmetric = CASES["gptq"]
    write(model, tmp_path, settings, pack, bits=bits, group=group, symmetric=symmetric, wanted=language)
    name = "model.language_model.layers.0.mlp.up_proj.g_idx"
    spoil(tmp_path, **{name: lambda g: g.flip(0)})
    with pytest.raises(ForeignError, match=r"layers\.0\.mlp\.up_proj has groups in the order of activations.*desc_act"):
        mmqc.load_quantized(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "hqq"}, r"quant_method 'hqq'.*reads awq, gptq, compressed-tensors"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'.*'gemm'"),
        ({"quant_method": "compressed-tensors"}, r"no tensor of the checkpoint is called \*\.weight_scale"),
    ],
)
def test_load__refuses_formats_with_a_reason(tmp_path, changes, words):
    model, _ = tiny_qwen2_vl()
    settings, pack, bits, group, symmetric = CASES["awq"]
    write(model, tmp_path, settings, pack, bits=bits, group=group, symmetric=symmetric, wanted=language)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ForeignError, match=words):
        mmqc.load_quantized(tmp_path)
