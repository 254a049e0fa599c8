"""Checkpoints that the compressed-tensors package itself compressed become mmqc's linears, or are refused with what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import loaded_by_transformers, save_compressed
from models import tiny_qwen2_vl
from safetensors.torch import save_file
from tolerance import assert_close
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, CompressedTensorsConfig

import mmqc
from mmqc.checkpoint.foreign_weights import ForeignError
from mmqc.nn.linear import QuantLinear

pytest.importorskip("compressed_tensors", reason="pip install 'mmqc[formats]' to make such checkpoints")

STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}
DYNAMIC = {**STATIC, "strategy": "token", "dynamic": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
FLOAT8 = {**INT8, "type": "float"}
READ: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "W4A16": ("pack-quantized", INT4, None),
    "W4A16 asymmetric": ("pack-quantized", {**INT4, "symmetric": False}, None),
    "W4A16 by channel, asymmetric": ("pack-quantized", {**INT8, "num_bits": 4, "symmetric": False}, None),
    "W8A16 asymmetric": ("pack-quantized", {**INT8, "symmetric": False}, None),
    "W8A8 static": ("int-quantized", INT8, STATIC),
    "W8A8 static, one weight scale": ("int-quantized", {**INT8, "strategy": "tensor"}, STATIC),
    "W8A8 fp8": ("float-quantized", FLOAT8, {**STATIC, "type": "float"}),
    "W8A8 fp8, one weight scale": ("float-quantized", {**FLOAT8, "strategy": "tensor"}, {**STATIC, "type": "float"}),
}


def compressed(weight: Tensor, form: str, scheme: Any) -> tuple[dict[str, Tensor], Tensor]:
    """A linear's tensors by the package's own code, and the weight that it makes of them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    args = scheme.weights
    grouped = {"group": weight.unflatten(1, (-1, args.group_size or 1)), "tensor": weight.reshape(1, 1, -1)}
    rows = grouped.get(args.strategy, weight[:, None])
    scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), args)
    scale, zero = (t.reshape(1) if args.strategy == "tensor" else t for t in (scale, zero))
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    return tensors, compressor.decompress(tensors, scheme)["weight"]


@torch.no_grad()
def write(model: Any, folder: Path, form: str, weights: Any, inputs: Any, **settings: Any) -> dict[str, Tensor]:
    """Saves ``model`` with the linears of its language model compressed; the weights that they stand for, by name."""
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    state, expected = {name: t.clone() for name, t in model.state_dict().items()}, {}
    state.pop("lm_head.weight") if model.config.tie_word_embeddings else None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "language_model" in name:
            tensors, expected[name] = compressed(state.pop(f"{name}.weight"), form, scheme)
            if inputs and not inputs["dynamic"]:
                tensors["input_scale"] = torch.full((1,), 0.05)
            state |= {f"{name}.{part}": t.contiguous() for part, t in tensors.items()}
    left = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in expected]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    save_compressed(model, folder, state, left, form, group, **settings)
    return expected


@torch.no_grad()
def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs, use_cache=False).logits


def linears(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


@pytest.mark.parametrize("case", READ)
def test_load__has_the_weights_and_the_logits_of_transformers_own_path(tmp_path: Path, case: str) -> None:
    model, inputs = tiny_qwen2_vl()
    expected = write(model, tmp_path, *READ[case])
    ours = mmqc.load_quantized(tmp_path)
    assert set(linears(ours)) == set(expected)
    for name, linear in linears(ours).items():
        assert torch.equal(linear.weight, expected[name]), name
        assert linear.weight_bits == READ[case][1]["num_bits"] or "A8" in case
        assert (linear.weight_zero is not None) == ("asymmetric" in case)
        assert linear.float8 == ("fp8" in case)
    if READ[case][2] is None:  # a float32 activation may lie on the other side of a tie
        assert_close(logits(ours, inputs), logits(loaded_by_transformers(tmp_path), inputs))


def test_load__asymmetric_models_save_and_load_like_any_other(tmp_path: Path) -> None:
    model, inputs = tiny_qwen2_vl()
    write(model, tmp_path, *READ["W4A16 asymmetric"])
    ours = mmqc.load_quantized(tmp_path)
    ours.save_pretrained(tmp_path / "mmqc")
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(tmp_path / "mmqc"), inputs), logits(ours, inputs))
    mmqc.save_pretrained(ours, tmp_path / "again", format="compressed-tensors")
    assert torch.equal(logits(mmqc.load_quantized(tmp_path / "again"), inputs), logits(ours, inputs))


REFUSED = {
    "fp8 weights alone": ("float-quantized", FLOAT8, None, "without float8 activations.*load it with from_pre"),
    "dynamic, one scale": ("int-quantized", INT8, {**DYNAMIC, "strategy": "tensor"}, r"one a token.*leave=\('activations',\)"),
    "zero points, dynamic": ("pack-quantized", {**INT4, "symmetric": False}, DYNAMIC, r"zero points of weights.*leave="),
    "groups beside fp8": ("pack-quantized", INT4, {**STATIC, "type": "float"}, r"groups of weights beside float8.*leave="),
    "static, asymmetric": ("int-quantized", INT8, {**STATIC, "symmetric": False}, r"zero points.*leave=\('activations',\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_load__refuses_what_it_cannot_represent(tmp_path: Path, case: str) -> None:
    form, weights, inputs, words = REFUSED[case]
    write(tiny_qwen2_vl()[0], tmp_path, form, weights, inputs)
    with pytest.raises(ForeignError, match=words):
        mmqc.load_quantized(tmp_path)


def test_load__leaves_activations_in_floating_point_if_told_so(tmp_path: Path) -> None:
    model, _ = tiny_qwen2_vl()
    expected = write(model, tmp_path, "int-quantized", INT8, DYNAMIC)
    ours = linears(mmqc.load_quantized(tmp_path, leave=("activations",)))
    assert set(ours) == set(expected)
    assert all(torch.equal(m.weight, expected[n]) and m.input_scale is None for n, m in ours.items())


def test_load__fp8_by_the_way_that_the_error_names(tmp_path: Path) -> None:
    model, inputs = tiny_qwen2_vl()
    expected = write(model, tmp_path, "float-quantized", FLOAT8, None)
    there = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=CompressedTensorsConfig(dequantize=True))
    name = next(iter(expected))
    assert torch.equal(there.get_submodule(name).weight, expected[name])
    mmqc.quantize_(there, mmqc.recipes.rtn(8), progress=False)
    assert torch.isfinite(logits(there, inputs)).all()
    assert linears(there)


def test_load__a_quantized_cache_is_refused_or_left(tmp_path: Path) -> None:
    model, inputs = tiny_qwen2_vl()
    expected = write(model, tmp_path, *READ["W4A16"], kv_cache_scheme={**FLOAT8, "strategy": "tensor"})
    from safetensors.torch import load_file

    state = load_file(tmp_path / "model.safetensors")
    scales = {f"model.language_model.layers.0.self_attn.{n}_scale": torch.ones(1) for n in ("k", "v")}
    save_file(state | scales, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ForeignError, match=r"quantizes the KV cache.*leave=\('kv_cache',\)"):
        mmqc.load_quantized(tmp_path)
    ours = mmqc.load_quantized(tmp_path, leave=("kv_cache",))
    assert all(torch.equal(m.weight, expected[n]) for n, m in linears(ours).items())
    assert torch.isfinite(logits(ours, inputs)).all()
    with pytest.raises(ValueError, match=r"leave = .'weights'.: allowed are activations, kv_cache"):
        mmqc.load_quantized(tmp_path, leave=("weights",))


def test_load__each_linear_by_its_own_scheme(tmp_path: Path) -> None:
    model, _ = tiny_qwen2_vl()
    write(model, tmp_path, *READ["W4A16"])
    config = json.loads((tmp_path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    dynamic = {"targets": ["re:.*self_attn.*"], "weights": INT8, "input_activations": {**DYNAMIC, "strategy": "tensor"}}
    config["quantization_config"]["config_groups"] = {"a": groups["group_0"], "b": dynamic}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ForeignError, match=r"self_attn\..*one a token"):
        mmqc.load_quantized(tmp_path)
