"""Per-token quantization and what stands in front of it, on one GPU: in one kernel, one by one, and with the mixed linear behind.

    python -m benchmarks.micro.fused_per_token --out results.json [--seconds 300] [--rows 16 2048 8192] [--tune]
    TRITON_INTERPRET=1 python -m benchmarks.micro.fused_per_token --dry        every step once, tiny, on the CPU

Per case and number of rows, microseconds of: front (what stands in front, as torch.compile fuses it: a sum and an RMSNorm with
gain; a gate and mmqc's Hadamard; a product with U_C), quantize (by token, behind it), apart (the two), fused (the one kernel),
product (the mixed linear) and apart + product, fused + product.  ``--tune`` tries numbers of warps of the norm's kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_run import Run, ceilings, facts, geomean
from mmqc.kernels.hadamard import basis_quantize_per_token, hadamard_quantize, hadamard_quantize_per_token
from mmqc.kernels.hadamard.hadamard_plan import hadamard_plan
from mmqc.kernels.matmul import mixed_matmul as product
from mmqc.kernels.rows import norm_quantize_per_token, quantize_per_token
from mmqc.kernels.rows.norm_quantize import Norm
from mmqc.kernels.shared.row_scale import Rows

NORM, HADAMARD, BASIS = "norm", "hadamard", "basis"
CASES = {  # name: (what stands in front, N, K, high channels)
    "llama3-8b.qkv": (NORM, 6144, 4096, 512),
    "llama3-8b.gate_up": (NORM, 28672, 4096, 512),
    "llama3-8b.down": (HADAMARD, 4096, 14336, 0),
    "qwen2-vl-7b.qkv": (NORM, 4608, 3584, 448),
    "qwen2-vl-7b.gate_up": (NORM, 37888, 3584, 448),
    "qwen2-vl-7b.down": (HADAMARD, 3584, 18944, 0),
    "keys of 128": (BASIS, 0, 128, 16),
}
DRY = {"norm": (NORM, 48, 96, 16), "down": (HADAMARD, 33, 64, 0), "keys": (BASIS, 0, 32, 4)}
WARPS = (1, 2, 4, 8)


def add_norm(x: Tensor, r: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers' models write it: rounded in front of the gain."""
    h = x + r
    wide = h.float()
    return h, gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)


def gate(x: Tensor, up: Tensor) -> Tensor:
    return F.silu(x) * up


class Case:
    """Operands of one case; as many copies as the L2 cache does not hold."""

    def __init__(self, run: Run, kind: str, n: int, k: int, high: int, m: int):
        self.run, self.kind, self.warps = run, kind, None
        self.widths, self.bits = ([k - high, high], [4, 8]) if high else ([k], [4])
        make = lambda *size: torch.randn(*size, device=run.device, dtype=run.dtype)  # noqa: E731
        self.pairs = [(make(m, k), make(m, k)) for _ in range(run.copies(4 * m * k))]
        self.gain = 1 + 0.1 * make(k)
        self.basis = torch.linalg.qr(torch.randn(k, k))[0].to(self.gain) if kind == BASIS else None
        self.weight = None
        if n:
            codes = [torch.randint(-8, 8, (n, w), dtype=torch.int8, device=run.device) for w in self.widths]
            scale = torch.rand(n, len(codes), device=run.device) * 0.01 + 0.001
            sums = torch.stack([c.sum(1, dtype=torch.int32) for c in codes], 1)
            self.weight = product.Weight(codes[0], codes[1] if high else None, scale, sums)
        compiled = (lambda f: f) if run.dry else torch.compile
        self.add_norm, self.gate = compiled(add_norm), compiled(gate)

    def front(self, x: Tensor, r: Tensor) -> Tensor:
        if self.kind == NORM:
            return self.add_norm(x, r, self.gain)[1]
        if self.kind == BASIS:
            return x @ self.basis
        return hadamard_quantize.plan(self.gate(x, r), None, hadamard_plan).run()

    def quantize(self, y: Tensor) -> Rows:
        return quantize_per_token.plan(y, self.widths, self.bits).run()

    def apart(self, x: Tensor, r: Tensor) -> Rows:
        return self.quantize(self.front(x, r))

    def fused(self, x: Tensor, r: Tensor) -> Rows:
        if self.kind == NORM:
            (launch,), (out, _) = norm_quantize_per_token.plan(
                x, Norm(1e-6, self.gain, None, r, True), None, self.widths, self.bits
            )
            launch._replace(num_warps=self.warps or launch.num_warps).run()
            return out
        if self.kind == BASIS:
            assert self.basis is not None
            return basis_quantize_per_token.plan(x, self.basis, self.widths, self.bits).run()
        return hadamard_quantize_per_token.plan(x, r, hadamard_plan, self.bits[0]).run()

    def multiply(self, rows: Rows) -> Tensor:
        assert self.weight is not None
        return product.mixed_matmul(rows, self.weight, out_dtype=self.run.dtype)

    def calls(self) -> dict[str, list[Callable[[], object]]]:
        rows = [self.apart(x, r) for x, r in self.pairs[:2]]
        ys = [self.front(x, r) for x, r in self.pairs]
        over = lambda f, given=self.pairs: [lambda a=a: f(*a) for a in given]  # noqa: E731
        found = {
            "front": over(self.front),
            "quantize": over(self.quantize, [(y,) for y in ys]),
            "apart": over(self.apart),
            "fused": over(self.fused),
        }
        if self.weight is None:
            return found
        return found | {
            "product": over(self.multiply, [(r,) for r in rows]),
            "apart + product": over(lambda x, r: self.multiply(self.apart(x, r))),
            "fused + product": over(lambda x, r: self.multiply(self.fused(x, r))),
        }

    def differing(self) -> float:
        """The share of codes that are not those of the two kernels one after the other."""
        x, r = self.pairs[0]
        off = (self.fused(x, r).q.int() - self.apart(x, r).q.int()).abs()
        return (off > 0).float().mean().item() if off.max() <= 1 else math.inf


def one_case(run: Run, name: str, given: tuple[str, int, int, int], m: int, tuning: bool) -> None:
    case, where = Case(run, *given, m), f"{name}/{m}"
    error = run.attempt(f"check {where}", case.differing)
    if error is not None:
        run.errors[where] = error
    if tuning and case.kind == NORM and not run.dry:
        times: dict[int, float] = {}
        for case.warps in WARPS:
            us = run.attempt(f"tune {where} {case.warps}", lambda: run.microseconds(case.calls()["fused"], 8, 0.03))
            if us is not None:
                times[case.warps] = us
        case.warps = min(times, key=lambda w: times[w], default=None)
        print(f"{where}: by warps", {w: round(t, 1) for w, t in times.items()})
    seen: dict[str, list[float]] = {}
    calls = list(case.calls().items())
    for what, ways in (*calls, *reversed(calls)):  # the clock falls as the GPU warms up: each is timed early and late
        us = run.attempt(f"{where} {what}", lambda ways=ways: run.microseconds(ways))
        if us is not None:
            seen.setdefault(what, []).append(us)
    run.times[where] = {what: sum(us) / len(us) for what, us in seen.items()}
    if "fused" in seen:
        wide = {NORM: 7, HADAMARD: 5, BASIS: 3}[case.kind]
        run.bandwidth[f"fused {where}"] = 1e-6 * wide * m * sum(case.widths) / run.times[where]["fused"]


def report(run: Run) -> dict[str, float]:
    summary: dict[str, float] = {}
    for where, times in run.times.items():
        rate = run.bandwidth.get(f"fused {where}")
        line = [*(f"{what} {us:.1f}" for what, us in times.items()), f"{rate:.2f} TB/s" if rate is not None else ""]
        print(f"{where:28}", "  ".join(line))
    for a, b in (("apart", "fused"), ("apart + product", "fused + product")):
        gains = [t[a] / t[b] for t in run.times.values() if {a, b} <= t.keys()]
        if gains:
            summary |= {f"{b} over {a}, geomean": geomean(gains), f"{b} over {a}, least": min(gains)}
    print("\n".join(f"{value:8.3f}  {name}" for name, value in summary.items()))
    print(f"\n{len(run.failures)} failures; most codes that differ {max(run.errors.values(), default=math.nan):.2e}")
    print("\n".join(run.failures)[-1500:])
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 2048, 8192])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    run = Run(args.dry, args.seconds)
    cases, rows = ({c: CASES[c] for c in args.cases}, args.rows) if not args.dry else (DRY, [5])
    run.attempt("ceilings", lambda: ceilings(run))
    for m in rows:
        for name, given in cases.items():
            run.attempt(f"{name}/{m}", lambda n=name, g=given, m=m: one_case(run, n, g, m, args.tune), 120)
    result: dict[str, Any] = {
        **facts(run),
        "summary": report(run),
        "times": run.times,
        "bandwidth": run.bandwidth,
        "differing": run.errors,
        "failures": run.failures,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    bad = [f for f in run.failures if not f.startswith("tune")]
    return int(bool(bad) or max(run.errors.values(), default=math.inf) > 0.02)


if __name__ == "__main__":
    sys.exit(main())
