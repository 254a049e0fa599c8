"""ResQ's mixed linear on one GPU: RMSNorm, per-token quantization and product, next to RMSNorm and cuBLAS in bf16.

    python benchmarks/mixed_linear.py --out results.json [--tune] [--seconds 300] [--rows 2048 8192]
    TRITON_INTERPRET=1 python benchmarks/mixed_linear.py --dry        every step once, tiny, on the CPU

Per shape and number of rows, microseconds of: bf16 (cuBLAS alone), mixed int8 and mixed fp8 (quantization + product, the low
weights packed in 4 bits and written out in every call), the same with weights written out once ("kept"), and quantization alone.
``--tune`` tries every tile of kernels/mixed_matmul.py first and uses the best; --configs adds them to a file of tuned tiles.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpu_run import Run, ceilings, geomean, relative_error  # noqa: E402

from mmqc.kernels import configs as tiles  # noqa: E402
from mmqc.kernels import mixed_matmul as kernel  # noqa: E402
from mmqc.kernels.configs import MatmulConfig  # noqa: E402
from mmqc.kernels.device_facts import gpu_name  # noqa: E402
from mmqc.kernels.quantize_per_token import quantize_per_token  # noqa: E402
from mmqc.ops.mixed_matmul import reference  # noqa: E402
from mmqc.ops.pack import pack_int4  # noqa: E402

SHAPES = {  # name: (N, K, high channels)
    "llama3-8b.qkv": (6144, 4096, 512), "llama3-8b.o": (4096, 4096, 512), "llama3-8b.gate_up": (28672, 4096, 512),
    "llama3-8b.down": (4096, 14336, 0),
    "qwen2-vl-7b.qkv": (4608, 3584, 448), "qwen2-vl-7b.o": (3584, 3584, 448), "qwen2-vl-7b.gate_up": (37888, 3584, 448),
    "qwen2-vl-7b.down": (3584, 18944, 0),
}  # fmt: skip
DRY = {"mixed": (48, 96, 16), "uniform": (33, 64, 0)}
LOW = {"int8": torch.int8, "fp8": kernel.FP8}
EACH, ALL = 1.3, 1.45  # what the mixed linear is to gain over bf16: on every shape, and on average


class Linear:
    """Operands of one shape."""

    def __init__(self, run: Run, n: int, k: int, high: int, m: int):
        self.run, self.m, self.n = run, m, n
        self.widths, self.bits = ([k - high, high], [4, 8]) if high else ([k], [4])
        self.x = torch.randn(m, k, device=run.device, dtype=run.dtype)
        self.w = torch.randn(n, k, device=run.device, dtype=run.dtype)
        codes = [torch.randint(-(2 ** (b - 1)), 2 ** (b - 1), (n, width), dtype=torch.int8, device=run.device)
                 for width, b in zip(self.widths, self.bits, strict=True)]  # fmt: skip
        scale = torch.rand(n, len(codes), device=run.device) * 0.01 + 0.001
        sums = torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1)
        self.packed = kernel.Weight(pack_int4(codes[0]), codes[1] if high else None, scale, sums)
        self.codes = codes
        self.kept = {kind: kernel.Weight(codes[0].to(code), codes[1].to(torch.float16) if high else None, scale, sums)
                     for kind, code in LOW.items()}  # fmt: skip
        self.out = torch.full((m, n), float("nan"), dtype=run.dtype, device=run.device)
        self.config: MatmulConfig | None = None

    def quantize(self, kind: str) -> kernel.Parts:
        return quantize_per_token(self.x, self.widths, self.bits, eps=1e-6, low_code=LOW[kind], high_code=torch.float16)

    def multiply(self, parts: kernel.Parts, weight: kernel.Weight) -> torch.Tensor:
        return kernel.mixed_matmul(parts, weight, out=self.out, out_dtype=self.run.dtype, config=self.config)

    def calls(self) -> dict[str, Callable[[], object]]:
        found: dict[str, Callable[[], object]] = {"bf16": lambda: F.linear(self.x, self.w)}
        found["quantize"] = lambda: self.quantize("int8")
        for kind in LOW:
            parts = self.quantize(kind)
            found[f"product {kind}"] = lambda kind=kind, parts=parts: self.multiply(parts, self.kept[kind])
            found[f"kept {kind}"] = lambda kind=kind: self.multiply(self.quantize(kind), self.kept[kind])
            found[f"mixed {kind}"] = lambda kind=kind: self.multiply(self.quantize(kind), self.packed)
        return found

    def error(self, kind: str) -> float:
        """Of a sample of the outputs against the op in float64."""
        self.out.fill_(float("nan"))
        self.multiply(self.quantize(kind), self.packed)
        some = torch.randperm(self.n, device=self.run.device)[:128]
        parts = self.quantize("int8")
        q = parts.low if parts.high is None else torch.cat((parts.low, parts.high.to(torch.int8)), 1)
        w = [pack_int4(self.codes[0][some]), *(c[some] for c in self.codes[1:])]
        want = reference(q, parts.scale, parts.offset, w, self.packed.scale[some], self.packed.sum[some], None, self.widths,
                         [4, 8][: len(w)], torch.float64)  # fmt: skip
        return relative_error(self.out[:, some], want)


def tune(run: Run, linear: Linear, kind: str) -> MatmulConfig | None:
    """The fastest tile."""
    best: tuple[float, MatmulConfig] | None = None
    parts = linear.quantize(kind)
    for c in kernel.TILES:
        linear.config = c
        call = lambda: linear.multiply(parts, linear.kept[kind])  # noqa: E731
        us = run.attempt(f"tune {linear.n} {kind} {c}", lambda call=call: run.microseconds([call] * 2, 8, 0.03), 40)
        if us is not None and (best is None or us < best[0]):
            best = us, c
    linear.config = None
    return best[1] if best else None


def one_shape(run: Run, name: str, shape: tuple[int, int, int], m: int, tuned: dict[str, Any], tuning: bool) -> None:
    n, k, high = shape
    linear = Linear(run, n, k, high, m)
    chosen: dict[str, MatmulConfig | None] = dict.fromkeys(LOW)
    for kind in LOW:
        error = run.attempt(f"check {name}/{m} {kind}", lambda kind=kind: linear.error(kind))
        if error is not None:
            run.errors[f"{name}/{m} {kind}"] = error
        if tuning and not run.dry:
            chosen[kind] = tune(run, linear, kind)
            if (best := chosen[kind]) is not None:
                tuned[tiles.key(kernel.op_name(kind == "fp8"), m, n, k)] = best.to_dict()
    for what, call in linear.calls().items():
        linear.config = chosen.get(what.split()[-1])
        us = run.attempt(f"{name}/{m} {what}", lambda call=call: run.microseconds([call] * 2))
        if us is not None:
            run.times.setdefault(f"{name}/{m}", {})[what] = us


def report(run: Run) -> dict[str, float]:
    summary: dict[str, float] = {}
    for where, times in run.times.items():
        print(f"{where:28}", "  ".join(f"{what} {us:.1f}" for what, us in times.items()))
    for kind in LOW:
        for way in ("mixed", "kept"):
            gains = {
                w: t["bf16"] / t[f"{way} {kind}"] for w, t in run.times.items() if {"bf16", f"{way} {kind}"} <= t.keys()
            }
            if gains:
                summary[f"{way} {kind} over bf16, geomean"] = geomean(list(gains.values()))
                summary[f"{way} {kind} over bf16, least"] = min(gains.values())
    best = [t["bf16"] / min(v for k, v in t.items() if k.startswith("mixed")) for t in run.times.values()
            if "bf16" in t and any(k.startswith("mixed") for k in t)]  # fmt: skip
    if best:
        summary["mixed (better type) over bf16, geomean"] = geomean(best)
        summary["mixed (better type) over bf16, least"] = min(best)
        print(f"\nbar: least >= {EACH}, geomean >= {ALL}")
    print("\n".join(f"{value:8.3f}  {name}" for name, value in summary.items()))
    print(f"\n{len(run.failures)} failures; worst error {max(run.errors.values(), default=math.nan):.2e}")
    print("\n".join(run.failures)[-1500:])
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--configs", type=Path, help="a file of kernels/configs to add the tuned tiles to")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    run = Run(args.dry, args.seconds)
    shapes, rows = ({s: SHAPES[s] for s in args.shapes}, args.rows) if not args.dry else (DRY, [20])
    torch.manual_seed(time.time_ns() % 2**31)
    tuned: dict[str, Any] = {}
    run.attempt("ceilings", lambda: ceilings(run))
    for m in rows:
        for name, shape in shapes.items():
            run.attempt(f"{name}/{m}", lambda n=name, s=shape, m=m: one_shape(run, n, s, m, tuned, args.tune), 240)
    summary = report(run)
    device = "cpu" if run.dry else torch.cuda.get_device_name()
    result = {"gpu": gpu_name(run.device), "device": device, "torch": torch.__version__, "times": run.times, "errors": run.errors,
              "summary": summary, "bandwidth": run.bandwidth, "failures": run.failures, "tiles": tuned}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.configs and tuned:
        known = json.loads(args.configs.read_text(encoding="utf-8")) if args.configs.exists() else {"configs": {}}
        known["configs"] |= tuned
        args.configs.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    bad = [f for f in run.failures if not f.startswith("tune")]
    return int(bool(bad) or max(run.errors.values(), default=math.inf) > 0.02)


if __name__ == "__main__":
    sys.exit(main())
