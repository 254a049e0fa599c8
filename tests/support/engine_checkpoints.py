"""Checkpoints to look at: ours for an engine, those of compressed-tensors' presets, and AWQ's and GPTQ's forms of one linear."""

import copy
import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import mmqc
from mmqc import recipes

ENGINE = "vllm==0.33"
WEIGHTS = "model.safetensors"


@functools.cache
def sample():
    """The shipped sample, whose widths are multiples of 128."""
    return mmqc.samples.load("digits-vqa")


@functools.cache
def _kept(name):
    folder = Path(tempfile.mkdtemp(prefix="mmqc-engine-")) / name
    model = copy.deepcopy(sample().model)
    if name == "w4a8":
        mmqc.quantize_(model, recipes.for_engine(recipes.rtn(4, activation_bits=8), ENGINE), progress=False)
    elif name == "w8a8":
        mmqc.quantize_(model, recipes.rtn(8, activation_bits=8), sample().calibration(2), progress=False)
    elif name == "head":
        mmqc.quantize_(model, recipes.rtn(8, head_bits=8), progress=False)
    else:
        return _preset(name, model, folder)
    mmqc.save_pretrained(model, folder, engine=ENGINE)
    return folder


def made(name, folder):
    """A copy of "w4a8" (int4 x float8, both towers), "w8a8" (static), "head" (W8A16, the head too), or of a preset."""
    return Path(shutil.copytree(_kept(name), folder))


def _preset(name, model, folder):
    """What compressed-tensors itself writes for a preset of LLM Compressor's, the language model alone, rounded to nearest."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    groups = {"group_0": preset_name_to_scheme(name, ["Linear"])}
    config = QuantizationConfig(config_groups=groups, ignore=["re:.*lm_head", "re:.*visual.*"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        args, weight = module.quantization_scheme.weights, module.weight.data
        rows = weight.unflatten(1, (-1, args.group_size)) if args.strategy == "group" else weight[:, None]
        low, high = rows.amin(-1), rows.amax(-1)
        if args.strategy == "tensor":
            low, high = weight.min()[None], weight.max()[None]
        scale, zero = calculate_qparams(low, high, args)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.02)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def packed(folder, method, bits=4, group=128, **settings):
    """A copy of the float sample whose language linears are AWQ's or GPTQ's, with codes of zeros."""
    model = sample().model
    model.save_pretrained(folder)
    path = Path(folder) / WEIGHTS
    tensors = load_file(path)
    for name in [n for n in tensors if ".layers." in n and n.endswith("proj.weight")]:
        module, (n, k) = name.removesuffix(".weight"), tensors.pop(name).shape
        per_word, groups = 32 // bits, k // group
        shapes = {"qweight": (k, n // per_word) if method == "awq" else (k // per_word, n), "qzeros": (groups, n // per_word)}
        tensors |= {f"{module}.{own}": torch.zeros(shape, dtype=torch.int32) for own, shape in shapes.items()}
        tensors[f"{module}.scales"] = torch.ones(groups, n, dtype=torch.float16)
        if method == "gptq":
            tensors[f"{module}.g_idx"] = torch.arange(k, dtype=torch.int32) // group
    save_file(tensors, path, {"format": "pt"})
    both = {"quant_method": method, "bits": bits, "group_size": group}
    own = {"zero_point": True, "version": "gemm"} if method == "awq" else {"sym": True, "desc_act": False}
    edit(folder, lambda config: config.update(quantization_config={**both, **own, **settings}))
    return Path(folder)


def edit(folder, change):
    """Changes config.json in place."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder, change):
    """Changes the tensors in place."""
    path = Path(folder) / WEIGHTS
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
