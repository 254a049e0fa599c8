"""Runs in vLLM's Python: its own parallel linears, built from a checkpoint's config and filled by its own loaders.

python vllm_layers.py WORLD RANK STORE OUT CHECKPOINT...     OUT: {checkpoint: {engine's name: {tensor: values}}} of one rank
"""

import contextlib
import json
import runpy
import sys
from pathlib import Path


def main(world, rank, store, out, *checkpoints):
    root = Path(__file__).parents[2]
    asking = runpy.run_path(str(root / "mmqc" / "engines" / "ask_vllm.py"))
    names = runpy.run_path(str(root / "mmqc" / "engines" / "names.py"))
    asking["prepare"].__globals__["one_rank"] = lambda: groups(int(world), int(rank), store)
    with contextlib.redirect_stdout(sys.stderr):
        asking["prepare"](90)
        with asking["configured"]("auto"):
            found = {each: layers(Path(each), asking, names) for each in checkpoints}
    import torch

    torch.save(found, out)


def groups(world, rank, store):
    """Process groups of ``world`` ranks by gloo."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(world)


def opened(checkpoint, asking, names, read):
    """A checkpoint's config, its model's names, vLLM's quantization config for it (``read`` makes it), and tensors by module.

    Modules and what vLLM joins are named as the model's class in vLLM names them.
    """
    from safetensors.torch import load_file
    from vllm.model_executor.models import ModelRegistry

    config = json.loads((checkpoint / "config.json").read_text())
    architecture = config["architectures"][0]
    cls = asking["load"](ModelRegistry.models[architecture].load_model_cls)
    model = asking["model_names"](architecture)
    quantization = read(config["quantization_config"])
    quantization.apply_vllm_mapper(cls.hf_to_vllm_mapper.get_rename_mapper())
    quantization.packed_modules_mapping = {k: list(v) for k, v in {**names["LANGUAGE"], **model["joined"]}.items()}
    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        module, _, own = name.rpartition(".")
        tensors.setdefault(names["renamed"](module, model), {})[own] = tensor
    return config, model, quantization, tensors


def layers(checkpoint, asking, names):
    """Every quantized linear of the language model and one block of the tower."""
    config, model, quantization, tensors = opened(checkpoint, asking, names, asking["quantization"])
    found = {}
    linears = [n for n in tensors if tensors[n].keys() & {"weight_packed", "weight_scale"}]
    for whole, parts in names["joined"](linears, model).items():
        if "layers." in whole or "blocks.0." in whole:
            layer = build(whole, [tensors[p] for p in parts], names, quantization, config.get("text_config", config))
            fill(layer, {part: tensors[part] for part in parts})
            found[whole] = {
                "scheme": type(getattr(layer, "scheme", None)).__name__,
                "kernel": type(asking["kernel_of"](layer)).__name__,
                **{name: value.data.clone() for name, value in layer._parameters.items() if value is not None},
            }
    return found


def build(whole, parts, names, quantization, text):
    """The engine's linear of that name."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    sizes = [_shape(part) for part in parts]
    import torch

    options = {"bias": "bias" in parts[0], "quant_config": quantization, "prefix": whole, "params_dtype": torch.bfloat16}
    if whole.endswith("qkv_proj"):
        heads = text["num_attention_heads"]
        return QKVParallelLinear(sizes[0][1], sizes[0][0] // heads, heads, text["num_key_value_heads"], **options)
    if len(parts) > 1:
        return MergedColumnParallelLinear(sizes[0][1], [n for n, _ in sizes], **options)
    kind = RowParallelLinear if names["split_by_rows"](whole) else ColumnParallelLinear
    return kind(sizes[0][1], sizes[0][0], **options)


def fill(layer, parts):
    """Its parameters, by their own loaders."""
    shards = {"q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "gate_proj": (0,), "up_proj": (1,)}
    for part, tensors in parts.items():
        shard = shards.get(part.rpartition(".")[2], ()) if len(parts) > 1 else ()
        for own, tensor in tensors.items():
            parameter = getattr(layer, own, None)
            assert parameter is not None or own == "weight_shape", (part, own)  # what nothing reads need not be registered
            if parameter is not None:
                parameter.weight_loader(parameter, tensor, *shard)


def _shape(entries):
    """[N, K] of a linear's weight."""
    if "weight_shape" in entries:
        return tuple(int(v) for v in entries["weight_shape"])
    return tuple(entries["weight"].shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
