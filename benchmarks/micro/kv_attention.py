"""Decode attention over a packed visual cache on one GPU, next to the bf16 kernels of torch: correctness, then medians.

    python -m benchmarks.micro.kv_attention --out results.json [--tune] [--seconds 450]
    TRITON_INTERPRET=1 python -m benchmarks.micro.kv_attention --dry          every step once, tiny, on the CPU

Shape: a layer of InternVL2.5-8B, 32 query heads, 8 KV heads of 128, batch 16, 8,192 visual and 64 text tokens.  One call is one
layer; copies rotate so that the L2 cache holds none of them.  Peers read the same tokens in bf16, and each is tried with grouped
queries as torch takes them and with the group as four queries of one head, which reads the cache once; the best counts.
Every width is timed with score calibration and without; the ratios are with it at 1 and 2 bits, as CalibQuant has it.
``--tune`` tries a list of configurations and reports the best; ``kernels/kv_attention.py:table`` is where it belongs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_run import Run, ceilings, facts, relative_error
from mmqc.kernels.kv.kv_attention import KVConfig, kv_attention, table
from mmqc.kernels.kv.kv_pack import kv_pack
from mmqc.ops import kv_attention as op

SHAPE = {"batch": 16, "heads": 8, "group": 4, "width": 128, "visual": 8192, "text": 64}
TINY = {"batch": 2, "heads": 2, "group": 4, "width": 32, "visual": 96, "text": 8}
BARS = {1: 5.0, 2: 3.5, 4: 2.0}
BITS = (1, 2, 4, 8)
PLAIN, CALIBRATED = (0.0, 0.0), (1.0, 2.0)
PER_SM = (6, 8, 10, 12, 14, 16, 20)
Layers = list[tuple[Tensor, ...]]
Call = Callable[[], object]


class Case:
    """One layer's tokens, in bf16 and packed."""

    def __init__(self, run: Run, shape: dict[str, int]):
        self.run, self.s = run, shape
        b, h, d = shape["batch"], shape["heads"], shape["width"]
        self.q = torch.randn(b, h * shape["group"], 1, d, device=run.device).to(run.dtype)
        self.k_text, self.v_text = (torch.randn(b, h, shape["text"], d, device=run.device).to(run.dtype) for _ in range(2))
        self.visual = torch.full((b,), shape["visual"], dtype=torch.int32, device=run.device)
        self.texts = torch.full((b,), shape["text"], dtype=torch.int32, device=run.device)
        self.order = torch.arange(shape["visual"], device=run.device).expand(b, -1).contiguous()

    def plain(self) -> tuple[Tensor, Tensor]:
        s = self.s
        size = (s["batch"], s["heads"], s["visual"] + s["text"], s["width"])
        k, v = (torch.randn(size, device=self.run.device, dtype=self.run.dtype) for _ in range(2))
        return k, v

    def packed(self, bits: int) -> tuple[Tensor, ...]:
        """Words, scales and offsets."""
        s = self.s
        size = (s["batch"], s["heads"], s["visual"], s["width"])
        x = torch.randn(size, device=self.run.device, dtype=self.run.dtype)
        where = (self.order, self.visual, bits, "channel", 0.6 if bits == 1 else 1.0)
        k_words, k_scale, k_offset = kv_pack(x, *where, False)
        v_words, v_scale, v_offset = kv_pack(x, *where, True)
        return k_words, v_words, k_scale, k_offset, v_scale, v_offset

    def layers(self, bits: int) -> Layers:
        """Packed layers that fill the L2 cache several times."""
        s = self.s
        size = s["batch"] * s["heads"] * s["visual"] * s["width"] * bits // 4
        return [self.packed(bits) for _ in range(self.run.copies(size))]

    def call(self, layer: tuple[Tensor, ...], bits: int, tau: tuple[float, float], config: KVConfig | None = None) -> Any:
        return kv_attention(*self.operands(layer, bits, tau), config=config)

    def operands(self, layer: tuple[Tensor, ...], bits: int, tau: tuple[float, float]) -> Any:
        return (self.q, *layer, self.visual, self.k_text, self.v_text, self.texts, bits, self.s["width"] ** -0.5, *tau)

    def time(self, layers: Layers, bits: int, tau: tuple[float, float], config: KVConfig | None = None) -> float:
        """Microseconds of one layer."""
        calls: list[Call] = [lambda p=p: self.call(p, bits, tau, config) for p in layers]
        return self.run.microseconds(calls) if config is None else self.run.microseconds(calls, 8, 0.02)

    def check(self, bits: int, tau: tuple[float, float], config: KVConfig | None = None) -> None:
        """Against the op's reference."""
        p = self.packed(bits)
        (y, lse), (want, want_lse) = self.call(p, bits, tau, config), op.reference(*self.operands(p, bits, tau))
        error, off = relative_error(y, want), (lse - want_lse).abs().max().item()
        self.run.errors[f"{bits} bits, tau {tau}, {config or 'table'}"] = error
        if error > 1e-2 or not off < 1e-2:
            raise AssertionError(f"wrong: y by {error:.1e}, lse by {off:.1e}")


def peers(run: Run, case: Any) -> Iterator[tuple[str, Callable[[Tensor, Tensor], object]]]:
    """bf16 attention of a decode step, by several kernels."""
    s = case.s
    folded = case.q.view(s["batch"], s["heads"], s["group"], s["width"])

    def sdpa(q: Tensor, gqa: bool, backend: SDPBackend) -> Callable[[Tensor, Tensor], object]:
        def call(k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)

        return call

    named = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    named = {"math": SDPBackend.MATH} if run.dry else named
    for name, backend in named.items():
        yield f"{name}, grouped", sdpa(case.q, True, backend)
        yield f"{name}, folded", sdpa(folded, False, backend)
    if not run.dry:
        from torch.nn.attention.flex_attention import flex_attention

        flex = torch.compile(flex_attention, dynamic=False)
        yield "flex, grouped", lambda k, v: flex(case.q, k, v, enable_gqa=True)
        yield "flex, folded", lambda k, v: flex(folded, k, v)


def time_peers(run: Run, case: Any, group: str = "bf16") -> float:
    """The best of them in microseconds."""
    layers = [case.plain() for _ in range(1 if run.dry else 2)]
    for name, call in peers(run, case):

        def timed(call: Any = call) -> float:
            return run.microseconds([lambda k=k, v=v: call(k, v) for k, v in layers])

        found = run.attempt(f"peer/{name}", timed, 120)
        if found is not None:
            run.times.setdefault(group, {})[name] = found
    return min(run.times.get(group, {}).values(), default=math.nan)


def tune(run: Run, case: Case, layers: Layers, bits: int, tau: tuple[float, float]) -> tuple[KVConfig, float] | None:
    """The fastest configuration of a list."""
    found: list[tuple[float, KVConfig]] = []
    ahead = (False, True) if tau != PLAIN else (False,)
    for registers, per_sm, more in itertools.product((0, 128), PER_SM[: 1 if run.dry else None], ahead):
        if run.left() < 60 or (bits == 8 and registers):
            continue
        c = KVConfig(per_sm, registers=registers, ahead=more)
        t = run.attempt(f"tune/{bits}/{c}", lambda c=c: case.time(layers, bits, tau, c), 30)
        if t is not None:
            found.append((t, c))
    for _, c in sorted(found, key=lambda pair: pair[0])[:2]:
        c = c.replace(early=True)
        t = run.attempt(f"tune/{bits}/{c}", lambda c=c: case.time(layers, bits, tau, c), 30)
        if t is not None:
            found.append((t, c))
    if not found:
        return None
    t, c = min(found, key=lambda pair: pair[0])
    print(
        f"{bits} bits, tau {tau}:",
        *(f"{c.per_sm}/{c.registers}{'/ahead' * c.ahead}{'/early' * c.early}: {t:.1f}" for t, c in found),
        flush=True,
    )
    return c, t


def time_packing(run: Run, case: Case, bits: list[int]) -> None:
    """The prefill's pack kernels, for keys or values of a layer."""
    s = case.s
    x = torch.randn(s["batch"], s["heads"], s["visual"], s["width"], device=run.device, dtype=run.dtype)
    for b in bits:

        def timed(b: int = b) -> float:
            return run.microseconds([lambda: kv_pack(x, case.order, case.visual, b, "channel", 1.0, False)])

        t = run.attempt(f"pack/{b}", timed)
        if t is not None:
            run.times.setdefault("pack", {})[f"{b} bits"] = t


def save(path: Path, run: Run, case: Case, summary: dict[str, float], tuned: dict[int, Any]) -> None:
    """Everything as JSON."""
    result = {
        **facts(run),
        "shape": case.s,
        "microseconds": run.times,
        "summary": summary,
        "tuned": tuned,
        "table": {b: vars(table(b, ranged=b <= 2)) for b in BITS},
        "tb_per_s": run.bandwidth,
        "errors": run.errors,
        "failures": run.failures,
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=450)
    parser.add_argument("--bits", type=int, nargs="+", default=list(BITS), choices=BITS)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    run = Run(args.dry, args.seconds)
    case = Case(run, TINY if args.dry else SHAPE)
    small = Case(run, {**(TINY if args.dry else SHAPE), "batch": 2, "visual": 96 if args.dry else 1000, "text": 37})
    run.attempt("ceilings", lambda: ceilings(run))
    for bits, tau in itertools.product(args.bits, (PLAIN, CALIBRATED)):
        run.attempt(f"check/{bits}/{tau}", lambda b=bits, t=tau: small.check(b, t))
    best, summary, tuned = time_peers(run, case), {}, {}
    for bits in args.bits:
        usual, other = (CALIBRATED, PLAIN) if bits <= 2 else (PLAIN, CALIBRATED)
        layers = case.layers(bits)
        t = run.attempt(f"ours/{bits}", lambda b=bits, u=usual, p=layers: case.time(p, b, u), 90)
        if args.tune and (found := tune(run, case, layers, bits, usual)) is not None:
            run.attempt(f"check/{bits}/tuned", lambda b=bits, u=usual, c=found[0]: small.check(b, u, c))
            tuned[bits] = {"config": vars(found[0]), "microseconds": found[1]}
            t = found[1] if t is None else min(t, found[1])
        if t is not None:
            run.times.setdefault("packed", {})[f"{bits} bits"] = t
            summary[f"{bits} bits over the best bf16 kernel"] = best / t
            s = case.s
            moved = s["batch"] * s["heads"] * s["visual"] * s["width"] * bits / 4
            run.bandwidth[f"{bits} bits, words alone"] = 1e-6 * moved / t
        t = run.attempt(f"ours/{bits}/{other}", lambda b=bits, u=other, p=layers: case.time(p, b, u), 60)
        if t is not None:
            name = f"{bits} bits, {'uncalibrated' if other == PLAIN else 'calibrated'}"
            run.times.setdefault("packed", {})[name] = t
        del layers
    time_packing(run, case, args.bits)
    for name, times in run.times.items():
        print(name, {k: round(v, 1) for k, v in times.items()})
    for name, value in summary.items():
        bar = BARS.get(int(name.split()[0]))
        print(f"{value:8.2f} x  {name}" + (f"   bar {bar}" if bar else ""))
    for bits, what in tuned.items():
        print(f"tuned {bits} bits: {what}")
    failed = [f for f in run.failures if not f.startswith("tune/")]
    print(f"{len(run.failures)} failures; worst error {max(run.errors.values(), default=math.nan):.2e}", *failed, sep="\n")
    if args.out:
        save(args.out, run, case, summary, tuned)
    return 1 if any(f.startswith("check/") for f in run.failures) else 0


if __name__ == "__main__":
    sys.exit(main())
