"""A decode step of one rank's share of a model, on one GPU: what two GPUs could save if sums over them cost nothing.

    python -m benchmarks.end_to_end.rank_share [--ranks 1 2] [--rows 1 16] [--dry] --out results.json

Qwen2-VL-7B's shape with random weights in W4A8, a head in 8 bits: its heads, its MLP and its vocabulary divided by ``--ranks``, the
hidden size whole.  One layer is quantized and repeated.  ``--dry``: a small model on the CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mmqc
from benchmarks.end_to_end import many_gpus_model as models
from benchmarks.end_to_end.host_cost import Calls, step
from benchmarks.gpu_run import Run, facts

WORDS = 152064


def share(shape: str, ranks: int, device: str) -> Any:
    """The model that one of ``ranks`` would have."""
    text = models.TEXTS[shape]
    hidden, heads, pairs = text["hidden_size"], text["num_attention_heads"] // ranks, text["num_key_value_heads"] // ranks
    size = hidden // text["num_attention_heads"]
    mlp = text["intermediate_size"] // ranks
    model = models.build(shape, 1, device)
    made = dict(device=device, dtype=model.dtype)
    layer = model.model.language_model.layers[0]
    attention, block = layer.self_attn, layer.mlp
    attention.num_heads, attention.num_key_value_heads, attention.num_key_value_groups = heads, pairs, heads // pairs
    model.config.get_text_config().num_key_value_heads = pairs  # a cache has as many
    for name, rows, columns in (
        ("q_proj", heads * size, hidden),
        ("k_proj", pairs * size, hidden),
        ("v_proj", pairs * size, hidden),
        ("o_proj", hidden, heads * size),
    ):
        setattr(attention, name, nn.Linear(columns, rows, bias=name != "o_proj", **made))
    for name, rows, columns in (("gate_proj", mlp, hidden), ("up_proj", mlp, hidden), ("down_proj", hidden, mlp)):
        setattr(block, name, nn.Linear(columns, rows, bias=False, **made))
    model.lm_head = nn.Linear(hidden, WORDS // ranks, bias=False, **made)
    batch = models.image_prompt(model, shape)
    mmqc.quantize_(model, mmqc.recipes.rtn(4, 8, head_bits=8), [batch], progress=False)
    models.repeat_layers(model, 2 if shape == "tiny" else models.LAYERS[shape])
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape, device = ("tiny", "cpu") if args.dry else ("8b", "cuda")
    figures: dict[str, Any] = {}
    for ranks in args.ranks:
        calls = Calls(share(shape, ranks, device), "eager")
        for rows in args.rows:
            found = figures[f"1 of {ranks}, {rows} rows"] = step(calls, models.text_prompts(calls.model, shape, rows))
            print(ranks, rows, {k: v for k, v in found.items() if k != "kernels"}, flush=True)
        torch._dynamo.reset()
    if args.out:
        args.out.write_text(json.dumps({**facts(Run(args.dry, 0)), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
