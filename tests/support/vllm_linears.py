"""Runs in vLLM's Python: its own parallel linears with mmqc's method, built and filled from a native checkpoint.

python vllm_linears.py WORLD RANK STORE OUT CHECKPOINT...     OUT: {checkpoint: {engine's name: {"y": its own part, "out": what
the engine's layer returns}}} of one rank
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

TOKENS, SEED = 12, 5


def main(world, rank, store, out, *checkpoints):
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    support = Path(__file__).parent
    layers = runpy.run_path(str(support / "vllm_layers.py"))
    asking = runpy.run_path(str(support.parents[1] / "mmqc" / "engines" / "ask_vllm.py"))
    names = runpy.run_path(str(support.parents[1] / "mmqc" / "engines" / "names.py"))
    with contextlib.redirect_stdout(sys.stderr):
        layers["groups"](int(world), int(rank), store)
        with asking["configured"]("auto"):
            found = {each: run(Path(each), int(world), int(rank), layers, asking, names) for each in checkpoints}
    import torch

    torch.save(found, out)


def inputs(width):
    """What every linear of that many input channels is given, on every rank."""
    import torch

    return torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(SEED + width)).bfloat16()


def token_ids(visual):
    """Two of three tokens stand for images."""
    import torch

    return torch.tensor([visual[t % 2] if t % 3 else 1 for t in range(TOKENS)])


def run(checkpoint, world, rank, layers, asking, names):
    """The outputs of every linear of the language model, of one block of the tower and of its merger."""
    import torch
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    import mmqc.vllm

    mmqc.vllm.register()
    read = get_quantization_config("mmqc").from_config
    config, model, quantization, tensors = layers["opened"](checkpoint, asking, names, read)
    text = config.get("text_config", config)
    embedding = VocabParallelEmbedding(text["vocab_size"], 8, quant_config=quantization, prefix="language_model.model.embed_tokens")
    kinds = [n for n, spec in quantization.modules.items() if spec["kind"] in mmqc.vllm.specs.LINEARS]
    whole = names["joined"](kinds, model)
    built = {
        name: build(name, [quantization.modules[p] for p in parts], names, quantization, config) for name, parts in whole.items()
    }
    for name in list(quantization.modules):
        if quantization.modules[name]["kind"] in mmqc.vllm.specs.NORMS:
            del quantization.modules[name]  # the loader's part
    if quantization.visual is not None:
        embedding(token_ids(config["quantization_config"]["visual_token_ids"]))
    found = {}
    with torch.no_grad():
        for name, layer in built.items():
            layers["fill"](layer, {part: tensors[part] for part in whole[name]})
            layer.quant_method.process_weights_after_loading(layer)
            if "layers." in name or "blocks.0." in name or "merger" in name:
                found[name] = outputs(layer, world, rank)
    return found


def outputs(layer, world, rank):
    """What the rank computes, and, where inputs are split, what the engine's layer returns."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    x, by_rows = inputs(layer.input_size), isinstance(layer, RowParallelLinear)
    x = x.chunk(world, -1)[rank] if by_rows else x
    bias = layer.bias if not by_rows or rank == 0 else None
    return {"y": layer.quant_method.apply(layer, x, bias), "out": layer(x)[0]}


def build(whole, specs, names, quantization, config):
    """The engine's linear of that name."""
    import torch
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    options = {"bias": specs[0]["bias"], "quant_config": quantization, "prefix": whole, "params_dtype": torch.bfloat16}
    inputs, outputs = sum(specs[0].get("widths", ())) or specs[0]["in"], [spec["out"] for spec in specs]
    text, vision = config.get("text_config", config), config["vision_config"]
    if whole.endswith("qkv_proj"):
        heads = text["num_attention_heads"]
        return QKVParallelLinear(inputs, outputs[0] // heads, heads, text["num_key_value_heads"], **options)
    if whole.endswith(".qkv"):
        return QKVParallelLinear(inputs, inputs // vision["num_heads"], vision["num_heads"], vision["num_heads"], **options)
    if len(specs) > 1:
        return MergedColumnParallelLinear(inputs, outputs, **options)
    by_rows = names["split_by_rows"](whole) or whole.endswith("merger.mlp.2")
    return (RowParallelLinear if by_rows else ColumnParallelLinear)(inputs, outputs[0], **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
