"""Floats of 4 bits in compressed-tensors: what mmqc writes is read by transformers where mmqc is not, and by mmqc itself."""

import json

import forked
import pytest
import torch
from models import tiny_qwen2_vl
from safetensors.torch import load_file, save_file

import mmqc
from mmqc import recipes
from mmqc.checkpoint.compressed_tensors import float4_form, in_pairs, in_stretches
from mmqc.nn.float4_linear import Float4Linear
from mmqc.ops.float4 import pack_float4

pytest.importorskip("compressed_tensors", reason="pip install 'mmqc[formats]' to read what mmqc writes")

THERE = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
folder = sys.argv[1]
model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
with torch.no_grad():
    y = model(**load_file(folder + "/inputs.safetensors"), use_cache=False).logits
weights = {n: m.weight.detach().clone() for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
save_file({"logits": y, **weights}, folder + "/there.safetensors")
assert not any(name.partition(".")[0] == "mmqc" for name in sys.modules)
"""


def scheme(form):
    return recipes.rtn(4).with_float4(form).language


def test_pairs__there_and_back():
    codes = torch.tensor([[0, 1, 2, 3, 4, 6], [8, 12, -12, -1, -2, 0]], dtype=torch.int8)
    packed = pack_float4(codes)
    assert in_pairs(packed, 6).tolist() == [[0x10, 0x32, 0x54], [0x76, 0x9F, 0x0A]]
    assert torch.equal(in_stretches(in_pairs(packed, 6)), packed)


@pytest.mark.parametrize("other", [{"group_size": 128}, {"num_bits": 8}, {"type": "int"}, {"strategy": "channel"}])
def test_form__no_other_floats(other):
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    assert float4_form(weights) == "mxfp4"
    assert float4_form({**weights, **other}) == ""


@torch.no_grad()
def test_save__transformers_reads_the_same_weights_without_mmqc(tmp_path):
    model, inputs = tiny_qwen2_vl(width=128, inner=256)
    model, inputs["pixel_values"] = model.to(torch.bfloat16), inputs["pixel_values"].bfloat16()
    model.model.language_model.layers[1].self_attn.q_proj.weight.mul_(5)
    config = mmqc.QuantConfig(vision=scheme("mxfp4"), projector=scheme("nvfp4"), language=scheme("nvfp4"))
    mmqc.quantize_(model, config, [inputs], progress=False)
    mmqc.save_pretrained(model, tmp_path, format="compressed-tensors")
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert {g["format"] for g in saved["config_groups"].values()} == {"nvfp4-pack-quantized", "mxfp4-pack-quantized"}
    save_file(inputs, tmp_path / "inputs.safetensors")
    forked.run("-c", THERE, str(tmp_path)).check_returncode()
    there, again = load_file(tmp_path / "there.safetensors"), mmqc.load_quantized(tmp_path)
    assert torch.equal(there.pop("logits"), again(**inputs, use_cache=False).logits)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, Float4Linear)}
    assert set(there) == set(linears)
    for name, weight in there.items():
        assert torch.equal(weight, linears[name].weight), name
    for name, linear in linears.items():
        assert torch.equal(again.get_submodule(name).qweight, linear.qweight)
        assert torch.equal(again.get_submodule(name).weight, linear.weight)
    attention = again.model.language_model.layers[1].self_attn  # vLLM has one global scale for q, k and v
    assert len({getattr(attention, f"{n}_proj").weight_divisor.item() for n in "qkv"}) == 1
    attention = model.model.language_model.layers[1].self_attn
    assert len({getattr(attention, f"{n}_proj").weight_divisor.item() for n in "qkv"}) > 1
    with pytest.raises(mmqc.FormatError, match=r"float4 group32 / none / mxfp4-pack-quantized. is a form that nobody asked"):
        mmqc.save_pretrained(model, tmp_path / "out", format="compressed-tensors", engine="vllm==0.33")


def test_save__refuses_blocks_that_are_cut(tmp_path):
    model, inputs = tiny_qwen2_vl()
    mmqc.quantize_(model, mmqc.QuantConfig(language=scheme("mxfp4")), [inputs], progress=False)
    with pytest.raises(mmqc.FormatError, match=r"down_proj has 296 input channels, no multiple of its group size 32"):
        mmqc.save_pretrained(model, tmp_path / "out", format="compressed-tensors")
