"""Decode and time to first token of a Qwen2-VL-7B-shaped model with random weights, end to end through ``generate``.

    python benchmarks/e2e.py --out benchmarks/results/e2e.json [--ways bf16 w4a16 ...]

Batch 1, one image of 840 x 840 pixels and 17 text tokens: 917 tokens of context.  ``generate`` with a static cache and a compiled
decode step; decode speed is (n2 - n1) / (t(n2) - t(n1)) for two lengths, so that prefill drops out.  Each way is a process of
its own with a time limit.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from rewrites import model_of

WAYS = ("bf16", "w4a16", "w8a16")
GRID, TEXT, IMAGE = (1, 60, 60), 17, 151655
FEW, MANY = 16, 144


def batch(model: Any) -> dict[str, torch.Tensor]:
    """One image, then text."""
    tokens = GRID[1] * GRID[2] // 4
    ids = torch.cat((torch.full((tokens,), IMAGE), torch.arange(1000, 1000 + TEXT)))[None].cuda()
    vision = model.config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(GRID[1] * GRID[2], width, device="cuda", dtype=torch.bfloat16)
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels,
        "image_grid_thw": torch.tensor([GRID]).cuda(), "mm_token_type_ids": (ids == IMAGE).long(),
    }  # fmt: skip


def child(way: str) -> None:
    """Build, quantize, generate; prints the figures."""
    import mmqc

    torch.manual_seed(0)
    model = model_of("qwen2_vl_7b", "cuda").eval()
    inputs = batch(model)
    if way != "bf16":
        bits = 4 if way == "w4a16" else 8
        start = time.perf_counter()
        mmqc.quantize_(model, mmqc.recipes.rtn(bits, group_size=128), progress=False)
        print(f"quantized in {time.perf_counter() - start:.0f} s", flush=True)
    from transformers import CompileConfig

    backend = "inductor" if way == "bf16" else "mmqc"
    more = {
        "do_sample": False, "cache_implementation": "static", "eos_token_id": None, "pad_token_id": 0,
        "compile_config": CompileConfig(backend=backend, mode="reduce-overhead", fullgraph=False),
    }  # fmt: skip

    def timed(n: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(**inputs, max_new_tokens=n, max_length=None, min_new_tokens=n, **more)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    start = time.perf_counter()
    timed(MANY)
    cold = time.perf_counter() - start
    timed(MANY)
    few, many, first = (min(timed(n) for _ in range(3)) for n in (FEW, MANY, 1))
    data = {"tokens_per_second": (MANY - FEW) / (many - few), "first_token_seconds": first, "cold_seconds": cold}
    print(json.dumps(data), flush=True)


def main() -> None:
    """Parse, run each way, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/e2e.json"))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=["bf16", "w4a16"])
    parser.add_argument("--seconds", type=int, default=280, help="time limit for each way")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    rows: dict[str, Any] = {}
    for way in args.ways:
        with tempfile.TemporaryFile("w+") as log:
            command = [sys.executable, __file__, "--child", way]
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=args.seconds)
                log.seek(0)
                rows[way] = (
                    json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"failed": log.read()[-1500:]}
                )
            except subprocess.TimeoutExpired:
                log.seek(0)
                rows[way] = {"failed": f"more than {args.seconds} s", "log": log.read()[-1500:]}
        print(way, rows[way], flush=True)
        data = {
            "command": "python benchmarks/e2e.py", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
            "python": platform.python_version(), "context": GRID[1] * GRID[2] // 4 + TEXT, "ways": rows,
        }  # fmt: skip
        args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
