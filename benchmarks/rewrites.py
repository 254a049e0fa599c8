"""Planning and applying the exact rewrites at the size of real models: seconds and memory.

    python -m benchmarks.rewrites --out benchmarks/results/rewrites.json [--plan-only]

Plans Qwen2-VL-7B and Llama-3-8B without weights on the CPU, each in a process of its own; then builds Qwen2-VL-7B with
random bfloat16 weights on the GPU and applies ``recipes.rotate()``.  Figures: wall seconds, peak resident memory of the
process, peak GPU memory beyond the model.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import mmqc

CASES = ("qwen2_vl_7b", "llama3_8b")


def model_of(case: str, device: str) -> torch.nn.Module:
    """The architecture at full size in bfloat16, without weights on the meta device."""
    if case == "llama3_8b":
        config = transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
        auto: Any = transformers.AutoModelForCausalLM
    else:
        text = {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
        }
        vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
        auto = transformers.AutoModelForImageTextToText
    with torch.device(device):
        return auto.from_config(config, dtype=torch.bfloat16).eval()


def batch_of(case: str, model: Any, device: str) -> dict[str, torch.Tensor]:
    """A short prompt, with an image of 4 x 4 patches where the model takes one."""
    if case == "llama3_8b":
        return {"input_ids": torch.arange(1, 9, device=device)[None]}
    config = model.config
    ids = [1, 2, config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id, 3, 4]
    tokens = torch.tensor([ids], device=device)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == config.image_token_id).int(),
        "pixel_values": torch.randn(16, 1176, dtype=torch.bfloat16, device=device),
        "image_grid_thw": torch.tensor([[1, 4, 4]], device=device),
    }


def plan(case: str) -> dict[str, Any]:
    """Seconds and resident memory of planning; meant for a fresh process."""
    model = model_of(case, "meta")
    planner, config, batch = mmqc.plan, mmqc.recipes.rotate(), batch_of(case, model, "cpu")  # imported here
    start = time.perf_counter()
    planned = planner(model, config, batch)
    seconds = time.perf_counter() - start
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "plan_seconds": seconds,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "rotated_spaces": next(len(r.sites) for r in planned.records if r.name == "fuse_rotation"),
    }


def apply(case: str) -> dict[str, Any]:
    """Seconds and GPU memory of ``quantize_(model, rotate())`` on a model with random weights."""
    model = model_of(case, "cuda")
    batch = batch_of(case, model, "cuda")
    with torch.no_grad():
        before = model(**batch).logits.float()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    start = time.perf_counter()
    report = mmqc.quantize_(model, mmqc.recipes.rotate(), [batch], progress=False)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        after = model(**batch).logits.float()
    blocks = [c for m in model.modules() if isinstance(m, torch.nn.ModuleList) for c in m]
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "model_gb": held / 1e9,
        "apply_seconds": seconds,
        "peak_beyond_model_gb": (torch.cuda.max_memory_allocated() - held) / 1e9,
        "largest_layer_float64_gb": largest * 8 / 1e9,
        "relative_change_of_bfloat16_logits": float((after - before).norm() / before.norm()),
        "passes": {r.name: {"sites": len(r.sites), "seconds": r.ms / 1e3} for r in report.passes},
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rewrites.json"))
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # one plan, printed: a fresh process
    given = parser.parse_args()
    if given.case:
        print(json.dumps(plan(given.case)))
        return
    results: dict[str, Any] = {
        "command": "python -m benchmarks.rewrites",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "plan": {},
    }
    for case in CASES:
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.rewrites", "--case", case], capture_output=True, text=True, check=False
        )
        if run.returncode:
            sys.exit(run.stderr)
        results["plan"][case] = json.loads(run.stdout.splitlines()[-1])
        print(case, results["plan"][case], flush=True)
    if not given.plan_only:
        results["apply"] = {case: apply(case) for case in CASES[:1]}
        print(results["apply"], flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
