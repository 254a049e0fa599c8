"""Every preset of LLM Compressor, compressed by the compressed-tensors package, computes what that package computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import loaded_by_transformers, save_compressed
from models import tiny_qwen2_vl
from often import often
from safetensors.torch import load_file
from tolerance import assert_close
from torch import Tensor, nn

import mmqc
from mmqc.nn.integer_weight import PackedLinear

pytest.importorskip("compressed_tensors", reason="pip install 'mmqc[formats]' to make such checkpoints")

PRESETS = {  # the format that LLM Compressor gives each, and what mmqc calls it
    "W4A16": ("pack-quantized", "W4A16-g128"),
    "W4A16_ASYM": ("pack-quantized", "W4A16-g128-asym"),
    "W8A16": ("pack-quantized", "W8A16-g128"),
    "W8A8": ("int-quantized", "W8A8-token"),
    "FP8": ("float-quantized", "W8A8-fp8"),
    "FP8_DYNAMIC": ("float-quantized", "W8A8-fp8-token"),
    "NVFP4A16": ("nvfp4-pack-quantized", "W4A16-nvfp4"),
    "MXFP4A16": ("mxfp4-pack-quantized", "W4A16-mxfp4"),
}


def compressed(weight: Tensor, form: str, scheme: Any) -> tuple[dict[str, Tensor], Tensor]:
    """A linear's tensors as the package's observers and compressors make them, and the weight that these stand for."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, extra = scheme.weights, {}
    group = args.group_size or (weight.shape[1] if args.strategy == "channel" else 0)
    rows = weight.unflatten(1, (-1, group)) if group else weight.reshape(1, 1, -1)
    if args.strategy == "tensor_group":
        extra["global_scale"] = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
    scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), args, **extra)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    state |= {f"weight_{name}": t for name, t in extra.items()}
    tensors = compressor.compress(state, scheme)
    tensors = {name: t for name, t in tensors.items() if name in compressor.compression_param_names(scheme)}
    return tensors, compressor.decompress(tensors, scheme)["weight"]


@torch.no_grad()
def write(model: Any, folder: Path, preset: str) -> dict[str, Tensor]:
    """Saves ``model`` with the linears of its language model compressed; the weights that they stand for, by name."""
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    form, scheme = PRESETS[preset][0], preset_name_to_scheme(preset, ["Linear"])
    state, expected = {name: t.clone() for name, t in model.state_dict().items()}, {}
    state.pop("lm_head.weight")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "language_model" in name:
            tensors, expected[name] = compressed(state.pop(f"{name}.weight"), form, scheme)
            if scheme.input_activations and not scheme.input_activations.dynamic:
                tensors["input_scale"] = torch.full((1,), 0.05)
            state |= {f"{name}.{part}": t.contiguous() for part, t in tensors.items()}
    left = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in expected]
    save_compressed(model, folder, state, left, form, json.loads(scheme.model_dump_json()))
    return expected


@torch.no_grad()
def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("preset", often(PRESETS, *list(PRESETS)[::3]))
def test_load__has_the_presets_weights_and_logits(tmp_path: Path, preset: str) -> None:
    model, inputs = tiny_qwen2_vl(width=256, inner=384)
    expected = write(model, tmp_path, preset)
    ours = mmqc.load_quantized(tmp_path)
    linears = {name: m for name, m in ours.named_modules() if isinstance(m, PackedLinear)}
    assert set(linears) == set(expected)
    assert {m.scheme for m in linears.values()} == {PRESETS[preset][1]}
    narrow = "FP4" in preset  # the package makes bfloat16 weights of them
    for name, linear in linears.items():
        weight = linear.weight
        assert torch.equal(weight.bfloat16() if narrow else weight, expected[name].to(torch.bfloat16 if narrow else weight.dtype))
    with torch.no_grad():
        for name, linear in linears.items():
            model.get_submodule(name).weight.copy_(linear.weight)
    found, unrounded = logits(ours, inputs), logits(model, inputs)  # activations
    if narrow:
        assert_close(found, unrounded)
        narrowed = inputs | {"pixel_values": inputs["pixel_values"].bfloat16()}
        there = loaded_by_transformers(tmp_path, dtype=torch.bfloat16)
        assert torch.equal(logits(mmqc.load_quantized(tmp_path, dtype=torch.bfloat16), narrowed), logits(there, narrowed))
        return
    want = logits(loaded_by_transformers(tmp_path), inputs)
    if "A16" in preset:
        assert_close(found, want)
    else:  # the package's steps are max|x| / 127.5, mmqc's and vLLM's max|x| / 127: apart by what rounding costs at most
        assert 0 < (found - want).norm() < 1.5 * (want - unrounded).norm()


@pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4A16", "W8A8", "FP8_DYNAMIC"])
def test_save__what_was_read_is_written_bit_by_bit(tmp_path: Path, preset: str) -> None:
    model, _ = tiny_qwen2_vl(width=256, inner=384)
    write(model, tmp_path, preset)
    mmqc.save_pretrained(mmqc.load_quantized(tmp_path), tmp_path / "again", format="compressed-tensors")
    before, after = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
