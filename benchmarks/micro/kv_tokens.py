"""The two other kernels of a packed cache on one GPU: attention to text in 8 and 4 bits, and keys rounded for queries.

    python -m benchmarks.micro.kv_tokens --out results.json [--tune] [--seconds 400]
    TRITON_INTERPRET=1 python -m benchmarks.micro.kv_tokens --dry              every step once, tiny, on the CPU

Shape: a layer of InternVL2.5-8B, 32 query heads, 8 KV heads of 128, batch 16.  Text: 8,192 places, all taken or a quarter of
them, blocks of 32 channels; copies rotate so that the L2 cache holds none of them.  Peers: the op's plain torch code, and torch's
kernels over the same tokens in bf16.  Rounding: 8,192 visual tokens, next to plain torch code and to nearest codes (kv_pack).
``--tune`` tries a list of configurations and reports the best; the kernels' files say where it belongs.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_run import Run, arguments, ceilings, facts, relative_error
from benchmarks.micro.kv_attention import time_peers
from mmqc.kernels.kv.kv_pack import kv_pack
from mmqc.kernels.kv.kv_round_keys import RoundConfig, kv_round_keys
from mmqc.kernels.kv.kv_token_attention import TokenConfig, kv_token_attention
from mmqc.ops import kv_round_keys as round_op
from mmqc.ops import kv_token_attention as op
from mmqc.ops.kv_pack import chosen
from mmqc.ops.kv_words import unpack_words

SHAPE = {"batch": 16, "heads": 8, "group": 4, "width": 128, "text": 8192, "visual": 8192, "block": 32}
TINY = {"batch": 2, "heads": 1, "group": 4, "width": 16, "text": 80, "visual": 48, "block": 8}
ROUNDED = (8, 4)  # bits of text
PACKED = (1, 2)  # bits of visual keys
TILES = (
    (32, 4, 3, 128),
    (32, 4, 3, 168),
    (32, 4, 2),
    (64, 4, 1),
    (64, 4, 2),
    (64, 4, 2, 168),
    (64, 8, 2),
    (128, 8, 2),
    (16, 1, 3),
    (16, 2, 3),
    (32, 2, 2),
)
PER_SM = (3, 4, 6, 8, 12)
ROUNDS = (
    RoundConfig(),
    RoundConfig(registers=0),
    RoundConfig(block=32, registers=0),
    RoundConfig(block=8),
    RoundConfig(tokens=16, warps=1, per_sm=16),
    RoundConfig(tokens=64, warps=4, per_sm=4),
    RoundConfig(per_sm=4),
    RoundConfig(per_sm=12, registers=80),
)


class Case:
    """One layer's text, in bf16 and rounded."""

    def __init__(self, run: Run, shape: dict[str, int]):
        self.run, self.s = run, shape
        b, h, d = shape["batch"], shape["heads"], shape["width"]
        self.q = torch.randn(b, h * shape["group"], 1, d, device=run.device).to(run.dtype)
        self.size = (b, h, shape["text"], d)

    def plain(self) -> tuple[Tensor, Tensor]:
        k, v = (torch.randn(self.size, device=self.run.device, dtype=self.run.dtype) for _ in range(2))
        return k, v

    def rounded(self, bits: int) -> tuple[Tensor, ...]:
        """Codes, scales and offsets of keys, then of values."""
        return tuple(part for t in self.plain() for part in op.quantize_tokens(t, bits, self.s["block"]))

    def operands(self, layer: tuple[Tensor, ...], bits: int, share: float = 1.0) -> Any:
        counts = torch.full((self.s["batch"],), int(share * self.s["text"]), dtype=torch.int32, device=self.run.device)
        return (self.q, *layer, counts, bits, self.s["width"] ** -0.5)

    def layers(self, bits: int) -> list[tuple[Tensor, ...]]:
        """Layers that fill the L2 cache several times."""
        return [self.rounded(bits) for _ in range(self.run.copies(math.prod(self.size) * bits // 4))]

    def time(self, layers: list[Any], bits: int, config: TokenConfig | None = None, share: float = 1.0) -> float:
        """Microseconds of one layer."""
        given = [self.operands(layer, bits, share) for layer in layers]
        calls = [lambda a=a: kv_token_attention(*a, config=config) for a in given]
        return self.run.microseconds(calls) if config is None else self.run.microseconds(calls, 8, 0.02)

    def check(self, bits: int, config: TokenConfig | None = None, share: float = 1.0) -> None:
        """Against the op's reference."""
        args = self.operands(self.rounded(bits), bits, share)
        (y, lse), (want, want_lse) = kv_token_attention(*args, config=config), op.reference(*args)
        error, off = relative_error(y, want), (lse - want_lse).abs().max().item()
        self.run.errors[f"text, {bits} bits, {share} of the places, {config or 'table'}"] = error
        if error > 1e-2 or not off < 1e-2:
            raise AssertionError(f"wrong: y by {error:.1e}, lse by {off:.1e}")


class Keys:
    """One layer's visual keys, and queries of few directions."""

    def __init__(self, run: Run, shape: dict[str, int]):
        self.run = run
        b, h, n, d = (shape[name] for name in ("batch", "heads", "visual", "width"))
        self.x = torch.randn(b, h, n, d, device=run.device, dtype=run.dtype)
        self.order = torch.arange(n, device=run.device).expand(b, -1).contiguous()
        self.count = torch.full((b,), n, dtype=torch.int32, device=run.device)
        q = torch.randn(h, 256, 8, device=run.device) @ torch.randn(h, 8, d, device=run.device)
        q += 0.3 * torch.randn_like(q)
        self.moment = q.mT @ q / 256

    def operands(self, bits: int) -> Any:
        rest = (self.moment, bits, 0.6 if bits == 1 else 1.0, round_op.DAMPING, round_op.SWEEPS)
        return (self.x, self.order, self.count, *rest)

    def loss(self, words: Tensor, scale: Tensor, offset: Tensor, bits: int) -> float:
        """What the descent makes small."""
        k, h = chosen(self.x, self.order).float(), round_op.weighting(self.moment, round_op.DAMPING, torch.float32)
        e = unpack_words(words, bits)[:, :, : k.shape[2]] * scale + offset - k
        return float(((e @ h) * e).sum())

    def check(self, bits: int, config: RoundConfig | None = None) -> None:
        """Codes of the reference but where a step lies on the middle between two; as small a sum in any case."""
        args = self.operands(bits)
        got, want = kv_round_keys(*args, config=config), round_op.reference(*args)
        codes, others = (unpack_words(t[0], bits) for t in (got, want))
        differ = (codes != others).any(-1).float().mean().item()
        error = abs(self.loss(*got, bits) / self.loss(*want, bits) - 1)
        self.run.errors[f"keys, {bits} bits, {config or 'default'}: tokens that differ"] = differ
        self.run.errors[f"keys, {bits} bits, {config or 'default'}: the sum"] = error
        if differ > 2e-2 or not error < 1e-3:
            raise AssertionError(f"wrong: {differ:.1%} of the tokens differ, the sum by {error:.1e}")

    def time(self, bits: int, config: RoundConfig | None = None) -> float:
        """Microseconds of one layer."""
        args = self.operands(bits)
        return self.run.microseconds([lambda: kv_round_keys(*args, config=config)], 8)


def note(run: Run, group: str, name: str, t: float | None) -> float | None:
    if t is not None:
        run.times.setdefault(group, {})[name] = t
    return t


def fastest(run: Run, name: str, configs: list[Any], timed: Callable[[Any], float], tuned: dict[str, Any]) -> Any | None:
    """The best configuration of a list."""
    found = []
    for c in configs[: 1 if run.dry else None]:
        t = run.attempt(f"tune/{name}/{c}", lambda c=c: timed(c), 30) if run.left() > 60 else None
        found += [] if t is None else [(t, c)]
    found.sort(key=lambda pair: pair[0])
    print(f"{name}:", *(f"{t:.1f} {vars(c)}" for t, c in found[:10]), sep="\n  ", flush=True)
    if not found:
        return None
    tuned[name] = {"config": vars(found[0][1]), "microseconds": found[0][0]}
    return found[0][1]


def time_text(run: Run, case: Case, bits: int, best: float, tuned: dict[str, Any] | None, small: Case) -> dict[str, float]:
    """Ours and plain torch; the ratios."""
    layers, name = case.layers(bits), f"text, {bits} bits"
    t = note(run, "text", f"{bits} bits", run.attempt(name, lambda: case.time(layers, bits), 60))
    if tuned is not None:
        configs = [TokenConfig(n, *tile) for tile, n in itertools.product(TILES, PER_SM)]
        c = fastest(run, name, configs, lambda c: case.time(layers, bits, c), tuned)
        run.attempt(f"check/{name}/tuned", lambda: small.check(bits, c))
    quarter = run.attempt(f"{name}/quarter", lambda: case.time(layers, bits, share=0.25), 60)
    note(run, "text", f"{bits} bits, a quarter of the places taken", quarter)
    args = case.operands(layers[0], bits)
    slow = run.attempt(f"plain/{name}", lambda: run.microseconds([lambda: op.reference(*args)], 5), 60)
    note(run, "plain torch", name, slow)
    if t is None:
        return {}
    moved = math.prod(case.size) * (bits / 4 + 8 / case.s["block"])  # codes, and four numbers of 16 bits a block
    run.bandwidth[f"{name}, codes and scales"] = 1e-6 * moved / t
    ratios = {f"{name} over the best bf16 kernel": best / t}
    return ratios if slow is None else ratios | {f"{name} over plain torch": slow / t}


def time_keys(run: Run, keys: Keys, bits: int, tuned: dict[str, Any] | None, small: Keys) -> dict[str, float]:
    """Ours, plain torch and nearest codes; the ratio."""
    args, name = keys.operands(bits), f"rounded keys, {bits} bits"
    t = note(run, "rounded keys", f"{bits} bits", run.attempt(name, lambda: keys.time(bits), 60))
    if tuned is not None:
        c = fastest(run, name, list(ROUNDS), lambda c: keys.time(bits, c), tuned)
        run.attempt(f"check/{name}/tuned", lambda: small.check(bits, c))
    nearest = (*args[:3], bits, "channel", 1.0, False)
    near = run.attempt(f"pack/{bits}", lambda: run.microseconds([lambda: kv_pack(*nearest)]))
    note(run, "rounded keys", f"{bits} bits, nearest codes", near)
    slow = run.attempt(f"plain/{name}", lambda: run.microseconds([lambda: round_op.reference(*args)], 5), 90)
    note(run, "plain torch", name, slow)
    return {} if t is None or slow is None else {f"{name} over plain torch": slow / t}


def save(path: Path, run: Run, shape: dict[str, int], summary: dict[str, float], tuned: dict[str, Any]) -> None:
    """Everything as JSON."""
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
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    args = arguments(__doc__, 400).parse_args()
    run, shape = Run(args.dry, args.seconds), TINY if args.dry else SHAPE
    small = {**shape, "batch": 1 if args.dry else 2, "visual": 20 if args.dry else 1000, "text": 50 if args.dry else 1001}
    some, few, tuned = Case(run, small), Keys(run, small), {}
    run.attempt("ceilings", lambda: ceilings(run))
    for bits, share in itertools.product(ROUNDED, (1.0, 0.3)):
        run.attempt(f"check/text/{bits}/{share}", lambda b=bits, s=share: some.check(b, share=s))
    for bits in (*PACKED, 4, 8):
        run.attempt(f"check/keys/{bits}", lambda b=bits: few.check(b))
    case, given, summary = Case(run, shape), tuned if args.tune else None, {}
    best = time_peers(run, case)
    for bits in ROUNDED:
        summary |= time_text(run, case, bits, best, given, some)
    keys = Keys(run, shape)
    for bits in PACKED:
        summary |= time_keys(run, keys, bits, given, few)
    for name, times in run.times.items():
        print(name, {k: round(v, 1) for k, v in times.items()})
    for name, value in summary.items():
        print(f"{value:8.2f} x  {name}")
    print({k: round(v, 2) for k, v in run.bandwidth.items()}, f"worst error {max(run.errors.values(), default=math.nan):.2e}")
    print(f"{len(run.failures)} failures", *run.failures, sep="\n")
    if args.out:
        save(args.out, run, shape, summary, tuned)
    return 1 if any(f.startswith("check/") for f in run.failures) else 0


if __name__ == "__main__":
    sys.exit(main())
