"""Weights as floats of 4 bits on one GPU: the linears of Qwen2-VL-7B, next to 4-bit integers in groups of 128 and to bf16.

    python -m benchmarks.micro.float4_linear --out results.json [--seconds 200]
    TRITON_INTERPRET=1 python -m benchmarks.micro.float4_linear --dry          every step once, tiny, on the CPU

Microseconds of one product without bias, weights rotating so that the L2 cache holds none of them.
"""

from __future__ import annotations

import json
import math
import sys

import torch
from torch.nn import functional as F

from benchmarks.gpu_run import Calls, Run, arguments, facts, relative_error
from mmqc.kernels.matmul.float4_matmul import float4_matmul
from mmqc.kernels.matmul.weight_only_matmul import weight_only_matmul
from mmqc.ops.float4_matmul import reference
from mmqc.specs import BLOCKS

SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}  # N, K
TINY = {"qkv": (48, 64), "down": (40, 96)}
ROWS = (1, 16, 64, 256, 2048)
GROUP = 128


def weights(run: Run, n: int, k: int, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Random bytes: every code is a number, and the scales are of usual sizes."""
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=run.device)
    low = 118 if form == "mxfp4" else 40
    scale = torch.randint(low, low + 8, (n, -(-k // BLOCKS[form])), dtype=torch.uint8, device=run.device)
    return packed, scale, torch.full((1,), 64.0, device=run.device) if form == "nvfp4" else None


def calls(run: Run, kind: str, m: int, n: int, k: int) -> Calls:
    """One product for each of as many weights as the cache does not hold."""
    x = torch.randn(m, k, device=run.device).to(run.dtype)
    copies = run.copies(n * k * 2 if kind == "bf16" else n * k // 2)
    if kind == "bf16":
        dense = [torch.randn(n, k, device=run.device).to(run.dtype) for _ in range(copies)]
        return [lambda w=w: F.linear(x, w) for w in dense]
    if kind == "int4":
        packed = [torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=run.device) for _ in range(copies)]
        scale = torch.rand(n, -(-k // GROUP), device=run.device) * 0.01
        return [lambda w=w: weight_only_matmul(x, w, scale, group_size=GROUP) for w in packed]
    return [lambda w=w: float4_matmul(x, *w, form=kind) for w in (weights(run, n, k, kind) for _ in range(copies))]


def check(run: Run, form: str, m: int, n: int, k: int) -> float:
    """Against the op in float64."""
    w, x = weights(run, n, k, form), torch.randn(m, k, device=run.device).to(run.dtype)
    return relative_error(float4_matmul(x, *w, form=form), reference(x.double(), *w, None, form))


def main() -> int:
    args = arguments(__doc__, 200).parse_args()
    run, shapes = Run(args.dry, args.seconds), TINY if args.dry else SHAPES
    for form in BLOCKS:
        for m in (1, 17, 300):
            error = run.attempt(f"check/{form}/{m}", lambda form=form, m=m: check(run, form, m, 200, 1088))
            run.errors[f"{form}/{m}"] = math.inf if error is None else error
    times: dict[str, float | None] = {}
    for name, (n, k) in shapes.items():
        for m in (2,) if args.dry else ROWS:
            for kind in ("bf16", "int4", *BLOCKS):
                what = f"{name}/{m}/{kind}"
                times[what] = run.attempt(what, lambda a=(kind, m, n, k): run.microseconds(calls(run, *a)))
                print(what, times[what], flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({**facts(run), "errors": run.errors, "microseconds": times}, indent=1) + "\n")
    return int(max(run.errors.values()) > 0.02)


if __name__ == "__main__":
    sys.exit(main())
