"""ResQ's mixed linear on one GPU: RMSNorm, per-token quantization and product, next to RMSNorm and cuBLAS in bf16.

    python -m benchmarks.micro.mixed_linear --out results.json [--tune] [--seconds 300] [--rows 2048 8192]
    TRITON_INTERPRET=1 python -m benchmarks.micro.mixed_linear --dry        every step once, tiny, on the CPU

Per shape and number of rows, microseconds of: bf16 (cuBLAS alone), mixed (quantization and product, the low weights packed in
4 bits and written out in every call), kept (the weight as written out, from the start), and of the parts: quantization,
unpacking, product; "norm" is torch's RMSNorm, which quantization does on the way and bf16 does not count.
``--tune`` tries every tile of kernels/mixed_matmul.py and every number of warps of quantize_per_token.py first and uses the best;
--configs adds the tiles to a file of tuned ones.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu_run import Run, arguments, ceilings, facts, geomean, relative_error
from benchmarks.tune import UNPACK, candidates, write_tiles
from mmqc.kernels.matmul import configs as tiles
from mmqc.kernels.matmul import mixed_matmul as kernel
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.rows import norm_quantize_per_token
from mmqc.kernels.rows.norm_quantize import Norm
from mmqc.kernels.shared.device_facts import has_warpgroup_products
from mmqc.kernels.shared.row_scale import Rows
from mmqc.kernels.warpgroup import packed_matmul as registers
from mmqc.ops.mixed_matmul import reference
from mmqc.ops.pack import pack_int4

SHAPES = {  # name: (N, K, high channels)
    "llama3-8b.qkv": (6144, 4096, 512),
    "llama3-8b.o": (4096, 4096, 512),
    "llama3-8b.gate_up": (28672, 4096, 512),
    "llama3-8b.down": (4096, 14336, 0),
    "qwen2-vl-7b.qkv": (4608, 3584, 448),
    "qwen2-vl-7b.o": (3584, 3584, 448),
    "qwen2-vl-7b.gate_up": (37888, 3584, 448),
    "qwen2-vl-7b.down": (3584, 18944, 0),
}
DRY = {"mixed": (48, 96, 16), "uniform": (33, 64, 0)}
WARPS = (1, 2, 4, 8)
EACH, ALL = 1.3, 1.45  # what the mixed linear is to gain over bf16: on every shape, and on average


class Linear:
    """Operands of one shape."""

    def __init__(self, run: Run, n: int, k: int, high: int, m: int):
        self.run, self.m, self.n = run, m, n
        self.widths, self.bits = ([k - high, high], [4, 8]) if high else ([k], [4])
        self.x = torch.randn(m, k, device=run.device, dtype=run.dtype)
        self.w = torch.randn(n, k, device=run.device, dtype=run.dtype)
        codes = [
            torch.randint(-(2 ** (b - 1)), 2 ** (b - 1), (n, width), dtype=torch.int8, device=run.device)
            for width, b in zip(self.widths, self.bits, strict=True)
        ]
        scale = torch.rand(n, len(codes), device=run.device) * 0.01 + 0.001
        sums = torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1)
        self.packed = kernel.Weight(pack_int4(codes[0]), codes[1] if high else None, scale, sums)
        self.codes = codes
        self.written = self.packed.written_out(self.widths[0])
        self.out = torch.full((m, n), float("nan"), dtype=run.dtype, device=run.device)
        self.config: MatmulConfig | None = None
        self.packed_config: MatmulConfig | None = None  # none: the packed weight is written out
        self.warps: int | None = None

    def quantize(self) -> Rows:
        (launch,), (out, _) = norm_quantize_per_token.plan(self.x, Norm(1e-6), None, self.widths, self.bits)
        launch._replace(num_warps=self.warps or launch.num_warps).run()
        return out

    def multiply(self, rows: Rows, weight: kernel.Weight) -> torch.Tensor:
        config = self.packed_config or self.config if weight is self.packed else self.config
        return kernel.mixed_matmul(rows, weight, out=self.out, out_dtype=self.run.dtype, config=config)

    def calls(self) -> dict[str, Callable[[], object]]:
        rows = self.quantize()
        return {
            "bf16": lambda: F.linear(self.x, self.w),
            "norm": lambda: F.rms_norm(self.x, self.x.shape[1:]),
            "quantize": self.quantize,
            "unpack": lambda: self.packed.written_out(self.widths[0]),
            "product": lambda: self.multiply(rows, self.written),
            "kept": lambda: self.multiply(self.quantize(), self.written),
            "mixed": lambda: self.multiply(self.quantize(), self.packed),
        }

    def error(self) -> float:
        """Of a sample of the outputs against the op in float64."""
        self.out.fill_(float("nan"))
        self.multiply(self.quantize(), self.packed)
        some = torch.randperm(self.n, device=self.run.device)[:128]
        w = [pack_int4(self.codes[0][some]), *(c[some] for c in self.codes[1:])]
        want = reference(
            *self.quantize(), w, self.packed.scale[some], self.packed.sum[some], None, self.widths, [4, 8][: len(w)], torch.float64
        )
        return relative_error(self.out[:, some], want)


def tune(run: Run, linear: Linear) -> None:
    """Set the fastest tile and the best number of warps."""
    times: dict[MatmulConfig, float] = {}
    rows = linear.quantize()
    op = kernel.PINGPONG[len(linear.widths)]
    for c in (*(candidates(op, linear.m, linear.n, 0) if has_warpgroup_products(linear.x.device) else ()), *kernel.TILES):
        linear.config = c
        call = lambda: linear.multiply(rows, linear.written)  # noqa: E731
        us = run.attempt(f"tune {linear.n} {c}", lambda call=call: run.microseconds([call] * 2, 8, 0.03), 40)
        if us is not None:
            times[c] = us
    linear.config = min(times, key=lambda c: times[c], default=None)
    linear.packed_config = in_registers_or_not(run, linear, rows)
    by_warps: dict[int, float] = {}
    for warps in WARPS:
        linear.warps = warps
        us = run.attempt(f"tune quantize {warps}", lambda: run.microseconds([linear.quantize] * 2, 8, 0.03), 40)
        if us is not None:
            by_warps[warps] = us
    linear.warps = min(by_warps, key=lambda w: by_warps[w], default=None)
    print(
        f"{linear.n} x {linear.x.shape[1]}, {linear.m} rows: tiles",
        [round(t, 1) for t in times.values()],
        "quantize by warps",
        {w: round(t, 1) for w, t in by_warps.items()},
    )


def in_registers_or_not(run: Run, linear: Linear, rows: Rows) -> MatmulConfig | None:
    """The fastest tile that unpacks on the way, where it is faster than writing out for the other.

    Timed for as long as what is reported: in short bursts it gains more.
    """
    tries = [linear.config, *(c for c in candidates(registers.MIXED, linear.m, linear.n, 0) if c.variant == "registers")]
    times: dict[MatmulConfig, float] = {}
    for c in tries if has_warpgroup_products(linear.x.device) else ():
        call = lambda c=c: kernel.mixed_matmul(rows, linear.packed, out=linear.out, out_dtype=run.dtype, config=c)  # noqa: E731
        us = run.attempt(f"tune {linear.n} packed {c}", lambda call=call: run.microseconds([call] * 2), 40)
        if us is not None and c is not None:
            times[c] = us
    best = min(times, key=lambda c: times[c], default=None)
    print("written out and multiplied, in registers:", [round(t, 1) for t in times.values()])
    return best if best is not None and best.variant == "registers" else None


def one_shape(run: Run, name: str, shape: tuple[int, int, int], m: int, tuned: dict[str, MatmulConfig], tuning: bool) -> None:
    n, k, high = shape
    linear = Linear(run, n, k, high, m)
    error = run.attempt(f"check {name}/{m}", linear.error)
    if error is not None:
        run.errors[f"{name}/{m}"] = error
    if tuning and not run.dry:
        tune(run, linear)
        if linear.config is not None:
            op = kernel.PINGPONG[len(linear.widths)] if linear.config.variant == "pingpong" else kernel.OP
            tuned[tiles.key(op, m, n, k)] = linear.config
        if has_warpgroup_products(linear.x.device):
            tuned[tiles.key(registers.MIXED if high else registers.OP, m, n, k)] = linear.packed_config or UNPACK
    calls, seen = list(linear.calls().items()), {}
    for what, call in (*calls, *reversed(calls)):  # the clock falls as the GPU warms up: each is timed early and late
        us = run.attempt(f"{name}/{m} {what}", lambda call=call: run.microseconds([call] * 2))
        if us is not None:
            seen.setdefault(what, []).append(us)
    run.times[f"{name}/{m}"] = {what: sum(us) / len(us) for what, us in seen.items()}
    for what, size in (("quantize", 3 * m * k), ("unpack", 1.5 * n * linear.widths[0])):
        if what in seen:
            run.bandwidth[f"{what} {name}/{m}"] = 1e-6 * size / run.times[f"{name}/{m}"][what]


def report(run: Run) -> dict[str, float]:
    summary: dict[str, float] = {}
    for where, times in run.times.items():
        rates = [f"{what} {run.bandwidth[f'{what} {where}']:.2f} TB/s" for what in ("quantize", "unpack") if what in times]
        print(f"{where:28}", "  ".join([*(f"{what} {us:.1f}" for what, us in times.items()), *rates]))
    print(f"\nbar: least >= {EACH}, geomean >= {ALL}")
    for way in ("mixed", "kept"):
        gains = [t["bf16"] / t[way] for t in run.times.values() if {"bf16", way} <= t.keys()]
        if gains:
            summary[f"{way} over bf16, geomean"] = geomean(gains)
            summary[f"{way} over bf16, least"] = min(gains)
    print("\n".join(f"{value:8.3f}  {name}" for name, value in summary.items()))
    print(f"\n{len(run.failures)} failures; worst error {max(run.errors.values(), default=math.nan):.2e}")
    print("\n".join(run.failures)[-1500:])
    return summary


def main() -> int:
    parser = arguments(__doc__, 300)
    parser.add_argument("--configs", type=Path, help="a file of kernels/configs to add the tuned tiles to")
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
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
    result = {
        **facts(run),
        "times": run.times,
        "errors": run.errors,
        "summary": summary,
        "bandwidth": run.bandwidth,
        "failures": run.failures,
        "tiles": {where: tile.to_dict() for where, tile in tuned.items()},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.configs and tuned:
        write_tiles(run, args.configs, tuned)
    bad = [f for f in run.failures if not f.startswith("tune")]
    return int(bool(bad) or max(run.errors.values(), default=math.inf) > 0.02)


if __name__ == "__main__":
    sys.exit(main())
