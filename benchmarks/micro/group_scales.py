"""W4A8 and W8A8 with a scale per 128 weights: float scales, integer scales, next to one scale per channel and to bf16.

    python -m benchmarks.micro.linear --only w4a8_groups --tune --out results.json

Part of linear.py.  Every form is timed with its own best tile (with ``--tune``: of ``candidates``), written to the same file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from benchmarks.gpu_run import Calls, Run, geomean, relative_error
from benchmarks.tune import fastest
from mmqc.kernels.matmul import configs as tiles
from mmqc.kernels.matmul.configs import MatmulConfig as Tile
from mmqc.kernels.matmul.group_scaled_matmul import group_scaled_matmul
from mmqc.kernels.matmul.scaled_matmul import scaled_matmul
from mmqc.ops.pack import pack_int4

GROUP, AMPLIFIER = 128, 1024
LINEARS = ("lm.qkv", "lm.o", "lm.gate_up", "lm.down")
ROWS = (1, 16, 256, 1024, 2048, 8192)
PROGRESSIVE = "w4_progressive"  # integer scales of 8 bits, folded into the weight from 512 rows on
FORMS = {  # name: (bits, integer scales, op in configs.py)
    "w4_integer": (4, True, "scaled_int4_group"),
    "w4_float": (4, False, "scaled_int4_group_float"),
    "w8_integer": (8, True, "scaled_int8_group"),
    "w8_float": (8, False, "scaled_int8_group_float"),
}
PLAIN = {"w4_channel": 4, "w8_channel": 8}
CONTENDERS = (PROGRESSIVE, "w4_integer", "w4_float", "w4_channel", "bf16", "w8_integer", "w8_float", "w8_channel")


@dataclass
class Case:
    """One shape and number of rows."""

    run: Run
    n: int
    k: int
    m: int
    config: Tile | None = None

    def __post_init__(self) -> None:
        device, groups = self.run.device, -(-self.k // GROUP)
        self.x = torch.randint(-128, 128, (self.m, self.k), dtype=torch.int8, device=device)
        self.out = torch.full((self.m, self.n), math.nan, dtype=self.run.dtype, device=device)
        self.one = torch.full((1,), 2e-4, device=device)
        self.t = torch.randint(4, 40, (self.n, groups), dtype=torch.int32, device=device)
        self.small = torch.randint(1, 16, (self.n, groups), dtype=torch.int8, device=device)
        self.channel = torch.full((self.n,), 1 / AMPLIFIER, device=device)
        self.codes: list[torch.Tensor] = []

    def weights(self, bits: int, rotate: bool) -> list[torch.Tensor]:
        count, top = self.run.copies(self.n * self.k * bits // 8) if rotate else 1, 2 ** (bits - 1)
        draw = lambda: torch.randint(-top, top, (self.n, self.k), dtype=torch.int8, device=self.run.device)  # noqa: E731
        self.codes = [draw()]
        made = [*self.codes, *(draw() for _ in range(count - 1))]
        return [pack_int4(w) for w in made] if bits == 4 else made

    def calls(self, name: str, rotate: bool = True) -> Calls:
        dtype = self.run.dtype
        if name == "bf16":
            x = self.x.to(dtype)
            w = [torch.randn(self.n, self.k, dtype=dtype, device=x.device) for _ in range(self.run.copies(2 * self.n * self.k))]
            return [lambda w=v: F.linear(x, w) for v in w]
        if name in PLAIN:
            return [
                lambda w=v: scaled_matmul(self.x, w, self.one, self.channel, out=self.out, out_dtype=dtype)
                for v in self.weights(PLAIN[name], rotate)
            ]
        if name == PROGRESSIVE:
            return [
                lambda w=v: group_scaled_matmul(
                    self.x,
                    w,
                    self.one,
                    self.channel,
                    group_size=GROUP,
                    out=self.out,
                    group_scale=self.small,
                    out_dtype=dtype,
                    config=self.config,
                )
                for v in self.weights(4, rotate)
            ]
        bits, integer, _ = FORMS[name]
        scale, t = (self.channel, self.t) if integer else (self.t / AMPLIFIER, None)
        return [
            lambda w=v: group_scaled_matmul(
                self.x, w, self.one, scale, group_size=GROUP, group_scale=t, out=self.out, out_dtype=dtype, config=self.config
            )
            for v in self.weights(bits, rotate)
        ]

    def expected(self, some: torch.Tensor, form: str) -> torch.Tensor:
        t = self.small if form == PROGRESSIVE else self.t
        wide = self.codes[0][some] * (t[some].double() / AMPLIFIER).repeat_interleave(GROUP, 1)[:, : self.k]
        return self.x.double() @ wide.t() * self.one.double()


def check(case: Case, form: str) -> None:
    """Poisoned output, float64 reference on a sample of the outputs."""
    case.out.fill_(math.nan)
    case.calls(form, rotate=False)[0]()
    some = torch.randperm(case.n, device=case.run.device)[:192]
    error = relative_error(case.out[:, some], case.expected(some, form))
    case.run.errors[f"check/groups/{form}/{case.m}x{case.n}x{case.k}"] = error
    if error > 4e-3 or bool(case.out.isnan().any()):
        raise AssertionError(f"wrong: relative error {error:.2e}, NaN left {bool(case.out.isnan().any())}")


def candidates(bits: int, m: int, k: int) -> list[Tile]:
    """Tiles worth a try; those that do not fit the device fail and are skipped."""
    if m <= 64:
        block_m = 8 if m <= 8 else 16 if m <= 16 else 64
        stored = k // 2 if bits == 4 else k
        return [
            Tile(block_m, bn, bk, w, s, split_k=split, variant="columns")
            for bn, bk, w, s in ((64, 128, 4, 4), (64, 128, 2, 4), (32, 128, 2, 4), (128, 128, 4, 3), (64, 64, 4, 5))
            for split in (1, 2, 4, 8)
            if split <= max(1, stored // bk // 2)
        ]
    packed = [
        Tile(bm, bn, bk, w, s, variant="columns")
        for bm, bn, bk, w, s in (
            (128, 128, 128, 8, 3),
            (64, 128, 128, 4, 3),
            (64, 128, 128, 8, 3),
            (128, 64, 128, 4, 3),
            (128, 64, 128, 8, 3),
            (64, 64, 128, 4, 4),
            (64, 256, 128, 8, 2),
            (128, 128, 64, 8, 4),
            (64, 128, 64, 4, 4),
        )
    ]
    # More than 64 sums a thread are taken in two halves: 128 x 256 with 8 warps, 128 x 128 with 4, of which two fit.
    whole = [
        Tile(bm, bn, 128, w, s, group_m=g, variant="unpack" if bits == 4 else "nested")
        for bm, bn, w, s, g in (
            (128, 256, 8, 4, 8),
            (128, 128, 4, 3, 8),
            (128, 256, 8, 4, 16),
            (256, 128, 8, 4, 8),
            (128, 256, 8, 3, 8),
            (128, 128, 8, 4, 8),
            (128, 128, 4, 2, 8),
            (64, 256, 4, 2, 8),
            (64, 128, 4, 4, 8),
            (64, 128, 4, 3, 8),
            (128, 64, 4, 4, 8),
            (64, 256, 8, 4, 8),
            (256, 64, 8, 4, 8),
        )
    ]
    pointers = [t.with_variant("columns").with_stages(3) for t in whole[5:6] + whole[8:11]] if bits == 8 else packed
    return (whole if bits == 8 or m > 256 else []) + pointers


def best_tile(run: Run, case: Case, form: str, end: float) -> Tile | None:
    """The fastest of the table's tile and the candidates; wrong and impossible ones are reported."""
    bits, _, op = FORMS[form]
    tries = [tiles.table(op, case.m, case.n, case.k, run.device), *candidates(bits, case.m, case.k)]
    return fastest(run, case, case.calls(form), tries, f"tune/{op}/{case.m}/{case.n}x{case.k}", end)


def check_all(run: Run, shapes: dict[str, tuple[int, int]]) -> None:
    """Odd sizes, and the real ones at several numbers of rows."""
    odd = [((27, 300), 5), ((300, 452), 33), ((64, 28), 3)]
    for (n, k), m in odd + ([] if run.dry else [(s, m) for s in shapes.values() for m in (1, 17, 300, 2048)]):
        for form in (*FORMS, PROGRESSIVE):
            run.attempt(f"check/groups/{form}/{m}x{n}x{k}", lambda n=n, k=k, m=m, f=form: check(Case(run, n, k, m), f))


def tune(run: Run, shapes: dict[str, tuple[int, int]], rows: list[int], seconds: float) -> dict[str, Tile]:
    """Best tiles by their key in the file of tiles; 4 bits first."""
    end, found = time.monotonic() + seconds, {}
    jobs = [(m, name, form) for form in FORMS for m in rows for name in shapes]
    for m, name, form in sorted(jobs, key=lambda job: (job[2].startswith("w8"), rows.index(job[0]))):
        if time.monotonic() > end:
            run.failures.append(f"tune/{form}/{name}/{m}: no time left")
            continue
        n, k = shapes[name]
        work = lambda n=n, k=k, m=m, f=form: best_tile(run, Case(run, n, k, m), f, end)  # noqa: E731
        tile = run.attempt(f"tune/{form}/{name}/{m}", work, 120)
        if tile is not None:
            found[tiles.key(FORMS[form][2], m, *shapes[name])] = tile
    return found


def run_groups(
    run: Run,
    shapes: dict[str, tuple[int, int]],
    rows: tuple[int, ...],
    tune_seconds: float,
    keep: Callable[[dict[str, Tile]], None],
) -> None:
    """Check, tune (for so many seconds; 0: not) and time; the rows and forms that acceptance names come first."""
    wanted = {name: shapes[name] for name in LINEARS if name in shapes}
    order = sorted(rows, key=lambda m: (m not in (8192, 2048), -m))
    check_all(run, wanted)
    if tune_seconds:
        keep(tune(run, wanted, order, tune_seconds))
    for m in order:
        for name, (n, k) in wanted.items():
            for who in CONTENDERS:
                work = lambda n=n, k=k, m=m, w=who: run.microseconds(Case(run, n, k, m).calls(w))  # noqa: E731
                us = run.attempt(f"groups {name}/{m} {who}", work)
                if us is not None:
                    run.times.setdefault(f"groups {name}/{m}", {})[who] = us


def summarize(run: Run, rows: tuple[int, ...]) -> dict[str, float]:
    """Speed ratios: geometric means over the shapes, and the lowest of them."""
    found = {}
    for m in rows:
        times = [t for where, t in run.times.items() if where.startswith("groups") and where.endswith(f"/{m}")]
        for fast, slow in (
            ("w4_integer", "w4_float"),
            ("w4_integer", "w4_channel"),
            ("w4_integer", "bf16"),
            (PROGRESSIVE, "w4_float"),
            (PROGRESSIVE, "w4_channel"),
            (PROGRESSIVE, "bf16"),
            ("w4_float", "bf16"),
            ("w8_integer", "w8_float"),
            ("w8_integer", "w8_channel"),
        ):
            ratios = [t[slow] / t[fast] for t in times if slow in t and fast in t]
            if ratios:
                found[f"{fast} over {slow}, M={m}"] = geomean(ratios)
                found[f"{fast} over {slow}, M={m}, lowest"] = min(ratios)
    return found
