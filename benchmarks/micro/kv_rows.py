"""Attention to ResQ's keys and values in rows of bytes on one GPU: 4 bits with one eighth at 8, and 4 bits alone.

    python -m benchmarks.micro.kv_rows --out results.json [--tune] [--seconds 200]
    TRITON_INTERPRET=1 python -m benchmarks.micro.kv_rows --dry              every step once, tiny, on the CPU

Shape: a layer of Llama-3-8B, 32 query heads, 8 KV heads of 128, 8,192 tokens, batch 16 and 1; layers rotate so that the L2 cache
holds none of them.  Peers: torch's kernels over the same tokens in bf16, and the op's plain torch code.  ``--tune`` tries a list of
configurations and reports the best; kernels/kv_rows_attention.py says where it belongs.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_run import Run, arguments, ceilings, facts, relative_error
from benchmarks.micro.kv_attention import time_peers
from benchmarks.micro.kv_tokens import fastest
from mmqc.kernels.kv.kv_rows_attention import kv_rows_attention
from mmqc.kernels.kv.kv_token_attention import TokenConfig
from mmqc.ops import kv_rows_attention as op
from mmqc.ops.kv_rows import row_bytes, to_rows
from mmqc.ops.quantize_per_token import reference as quantize_per_token

SHAPE = {"heads": 8, "group": 4, "width": 128, "tokens": 8192}
TINY = {"heads": 1, "group": 4, "width": 16, "tokens": 80}
KINDS = {"4 and 8 bits": ((7, 1), (4, 8)), "4 bits": ((8,), (4,)), "8 bits": ((8,), (8,))}  # eighths of the channels, bits
TILES = ((32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 3, 168), (64, 8, 2), (128, 4, 2), (128, 8, 2), (32, 2, 3))
CONFIGS = [TokenConfig(per_sm, *tile) for tile in TILES for per_sm in (2, 3, 4, 6, 8)]


class Case:
    """One layer of a batch."""

    def __init__(self, run: Run, batch: int, shape: dict[str, int], kind: str):
        self.run, self.s = run, {**shape, "batch": batch}
        eighths, bits = KINDS[kind]
        self.widths, self.bits = [e * shape["width"] // 8 for e in eighths], list(bits)
        heads, d = shape["heads"], shape["width"]
        self.q = torch.randn(batch, heads * shape["group"], 1, d, device=run.device).to(run.dtype)
        self.size = (batch, heads, shape["tokens"], d)
        self.bytes = 2 * batch * heads * shape["tokens"] * row_bytes(self.widths, self.bits)  # of keys and values

    def plain(self) -> tuple[Tensor, Tensor]:
        k, v = (torch.randn(self.size, device=self.run.device, dtype=self.run.dtype) for _ in range(2))
        return k, v

    def operands(self) -> tuple[Any, ...]:
        rows = (quantize_per_token(t, None, self.widths, self.bits) for t in self.plain())
        k, v = (to_rows(*parts, self.widths, self.bits) for parts in rows)
        return self.q, k, v, self.widths, self.bits, self.s["width"] ** -0.5

    def layers(self) -> list[tuple[Any, ...]]:
        """Layers that fill the L2 cache several times."""
        return [self.operands() for _ in range(min(16, self.run.copies(self.bytes)))]

    def time(self, layers: list[tuple[Any, ...]], config: TokenConfig | None = None) -> float:
        """Microseconds of one layer."""
        calls = [lambda a=a: kv_rows_attention(*a, config=config) for a in layers]
        return self.run.microseconds(calls) if config is None else self.run.microseconds(calls, 8, 0.02)

    def check(self, config: TokenConfig | None = None) -> float:
        """Against the op's reference."""
        args = self.operands()
        return relative_error(kv_rows_attention(*args, config=config), op.reference(*args))


def main() -> int:
    args = arguments(__doc__, 200).parse_args()
    run, shape = Run(args.dry, args.seconds), TINY if args.dry else SHAPE
    tuned: dict[str, Any] = {}
    summary: dict[str, float] = {}
    run.attempt("ceilings", lambda: ceilings(run))
    for batch in (2,) if args.dry else (16, 1):
        best = math.nan
        for kind in KINDS:
            name, small = f"{kind}/{batch}", Case(run, 1, {**shape, "tokens": 50 if args.dry else 1001}, kind)
            error = run.attempt(f"check/{name}", small.check)
            run.errors[name] = math.inf if error is None else error
            case = Case(run, batch, shape, kind)
            if math.isnan(best):
                best = time_peers(run, case, f"bf16/{batch}")
            layers = case.layers()
            us = run.attempt(name, lambda case=case, layers=layers: case.time(layers), 60)
            slow = run.attempt(f"plain/{name}", lambda a=layers[0]: run.microseconds([lambda: op.reference(*a)], 5), 60)
            if us is None:
                continue
            run.times[name] = {"ours": us} | ({} if slow is None else {"plain torch": slow})
            run.bandwidth[name] = 1e-6 * case.bytes / us
            summary[f"{name} over the best bf16 kernel"] = best / us
            if args.tune:
                timed = lambda c, case=case, layers=layers: case.time(layers, c)  # noqa: E731
                c = fastest(run, name, CONFIGS, timed, tuned)
                error = run.attempt(f"check/{name}/tuned", lambda small=small, c=c: small.check(c))
                run.errors[f"{name} tuned"] = math.inf if error is None else error
    for name, times in run.times.items():
        print(name, {k: round(v, 1) for k, v in times.items()})
    print(*(f"{value:8.2f} x  {name}" for name, value in summary.items()), sep="\n")
    print({k: round(v, 2) for k, v in run.bandwidth.items()}, f"worst error {max(run.errors.values()):.2e}")
    print(f"{len(run.failures)} failures", *run.failures, sep="\n")
    if args.out:
        result = {
            **facts(run),
            "shape": shape,
            "microseconds": run.times,
            "summary": summary,
            "tuned": tuned,
            "tb_per_s": run.bandwidth,
            "errors": run.errors,
            "failures": run.failures,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(max(run.errors.values()) > 1e-2)


if __name__ == "__main__":
    sys.exit(main())
