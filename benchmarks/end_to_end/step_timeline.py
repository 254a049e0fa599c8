"""Where a step of a batch goes: each kernel of it, and how much later than the one before it ends.

    python -m benchmarks.end_to_end.step_timeline [--way w4a8] [--rows 64] [--layers 4] [--dry] --out results.json

The decoder of Qwen2-VL-7B's shape with random weights and few layers, prompts of 300 tokens, ``generate`` with
``mmqc.compiled_loop``.  Kernels start before those in front have ended, so that their own durations overlap; differences of their
ends do not.  ``--dry``: a small model on the CPU, where nothing is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

import mmqc
from benchmarks.end_to_end.cold_start import CONFIGS, prompt
from benchmarks.end_to_end.host_cost import Calls
from benchmarks.gpu_run import Run, facts

TOKENS = 24  # new ones of the call that is looked at


def decoder(layers: int, dry: bool) -> Any:
    """Qwen2-VL with so many layers, and a tower of one block."""
    hidden, middle, heads, kv, vocabulary = (64, 128, 4, 2, 512) if dry else (3584, 18944, 28, 4, 152064)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3] if dry else [16, 24, 24], "rope_theta": 1e6}
    text = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": middle, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "rope_parameters": rope, "bos_token_id": 0,
            "eos_token_id": 1}  # fmt: skip
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": hidden, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    ids = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    with torch.device("cpu" if dry else "cuda"):
        return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32 if dry else torch.bfloat16).eval()


def timeline(calls: Calls, inputs: dict[str, torch.Tensor]) -> list[tuple[float, str]]:
    """(Microseconds between its end and that of the kernel before it, name) of the last kernels but for the first steps'."""
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        calls.seconds(inputs, TOKENS)
    ends = sorted((e.time_range.end, e.name) for e in run.events() if e.device_type.name == "CUDA")
    later = [(b[0] - a[0], b[1]) for a, b in itertools.pairwise(ends)]
    steps = [i for i, (_, name) in enumerate(later) if "ArgMax" in name]
    return [(round(us, 1), name[:100]) for us, name in later[steps[-3] + 1 : steps[-2] + 1]]


def main() -> None:
    """One way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", default="w4a8", choices=[*CONFIGS, "bf16"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = decoder(args.layers, args.dry)
    if args.way in CONFIGS:
        config = CONFIGS[args.way]()
        mmqc.quantize_(model, config, [prompt(model, (8, 8))] if config.needs_calibration else None, progress=False)
    calls = Calls(model, "recorded")
    ids = torch.randint(100, 500, (args.rows, 30 if args.dry else 300), device=model.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for _ in range(4):
        calls.seconds(inputs, TOKENS)
    kernels = [] if args.dry else timeline(calls, inputs)
    args.out.write_text(json.dumps({**facts(Run(args.dry, 0)), "layers": args.layers, "kernels": kernels}, indent=1) + "\n")


if __name__ == "__main__":
    main()
