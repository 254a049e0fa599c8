"""The linears of Qwen2-VL-7B on one GPU: correctness, then medians, ours next to cuBLAS and the int4 kernels of others.

    python -m benchmarks.micro.linear --out results.json [--tune] [--seconds 450]
    TRITON_INTERPRET=1 python -m benchmarks.micro.linear --dry          every step once, tiny, on the CPU

``--tune`` tries a list of tiles per shape first and writes mmqc/kernels/configs/<gpu>.json (or --configs PATH), which the same
run then uses.  What fails is reported and does not stop the rest.  Bandwidths count the bytes that must move.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu_run import Calls, Run, ceilings, facts, geomean, relative_error
from benchmarks.micro import epilogues, group_scales
from benchmarks.micro.chain import time_chain
from benchmarks.micro.row_kernels import check_rows, time_one_row, time_rows
from benchmarks.tune import candidates, fastest, worth_tuning, write_tiles
from mmqc.kernels.matmul import by_rows
from mmqc.kernels.matmul import configs as tiles
from mmqc.kernels.matmul import scaled_matmul as scaled_kernel
from mmqc.kernels.matmul.by_rows import Part
from mmqc.kernels.matmul.configs import MatmulConfig as Tile
from mmqc.kernels.matmul.scaled_matmul import scaled_matmul
from mmqc.kernels.matmul.weight_only_matmul import weight_only_matmul
from mmqc.kernels.shared import compile_ahead
from mmqc.kernels.shared.device_facts import gpu_name
from mmqc.kernels.shared.launch import Launch, Shape
from mmqc.kernels.shared.row_scale import ONE, RowScale
from mmqc.kernels.warpgroup.pingpong_matmul import OPS as PINGPONG_OPS
from mmqc.ops.pack import pack_int4
from mmqc.ops.weight_only_matmul import dequantize

FP8 = torch.float8_e4m3fn
SHAPES = {  # name: (N, K)
    "lm.qkv": (4608, 3584),
    "lm.o": (3584, 3584),
    "lm.gate_up": (37888, 3584),
    "lm.gate": (18944, 3584),  # above 64 rows gate and up of packed weights are products of their own
    "lm.down": (3584, 18944),
    "vit.qkv": (3840, 1280),
    "vit.proj": (1280, 1280),
    "vit.fc1": (5120, 1280),
    "vit.fc2": (1280, 5120),
    "merger.0": (5120, 5120),
    "merger.2": (3584, 5120),
}
OTHERS = {  # decoders of other models, and halves of two that ranks share; by name alone
    "lm_2b.qkv": (2048, 1536),
    "lm_2b.gate_up": (17920, 1536),
    "lm_2b.down": (1536, 8960),
    "lm_llava_7b.qkv": (12288, 4096),
    "lm_llava_7b.o": (4096, 4096),
    "lm_llava_7b.gate_up": (22016, 4096),
    "lm_llava_7b.down": (4096, 11008),
    "lm_72b.qkv": (10240, 8192),
    "lm_72b.o": (8192, 8192),
    "lm_72b.gate_up": (59136, 8192),
    "lm_72b.gate": (29568, 8192),
    "lm_72b.down": (8192, 29568),
    "lm_half.qkv": (2304, 3584),
    "lm_half.o": (3584, 1792),
    "lm_half.gate_up": (18944, 3584),
    "lm_half.gate": (9472, 3584),
    "lm_half.down": (3584, 9472),
    "lm_72b_half.qkv": (5120, 8192),
    "lm_72b_half.o": (8192, 4096),
    "lm_72b_half.gate": (14784, 8192),
    "lm_72b_half.down": (8192, 14784),
}
ROWS = (1, 16, 256, 917, 2048, 8192)
GROUP = 128
LARGE = {
    "scaled_int8": "int8",
    "scaled_fp8": "fp8",
    "pingpong_int8": "int8",
    "pingpong_fp8": "fp8",
    "scaled_int4": "int4",
    "packed_int4": "int4",
}
SKINNY = {"weight_int4": 4, "weight_int8": 8, "scaled_int4": "int4", "scaled_int8": "int8"}
PACKED = ("scaled_int4", "packed_int4")
CLASSIC = {any_kernel: op for op, any_kernel in PINGPONG_OPS.items()}


class Linear:
    """Operands of one shape, and the calls that multiply them."""

    def __init__(self, run: Run, n: int, k: int, m: int):
        self.run, self.n, self.k, self.m = run, n, k, m
        self.device = run.device
        self.w_scale = torch.rand(n, device=self.device) * 0.01 + 0.001
        self.x_scale = torch.full((1,), 0.02, device=self.device)
        self.bias = torch.randn(n, device=self.device).to(run.dtype)
        self.out = torch.full((m, n), float("nan"), dtype=run.dtype, device=self.device)
        self.operands: tuple[torch.Tensor, ...] = ()  # of the latest calls
        self.config: Tile | None = None  # read by the calls when they run; None is what a user gets

    def codes(self, rows: int, low: int = -128, high: int = 128) -> torch.Tensor:
        return torch.randint(low, high, (rows, self.k), dtype=torch.int8, device=self.device)

    def floats(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        # Halves at a time: a float32 copy of the largest weight is half a gigabyte.
        return torch.randn(rows, self.k, device=self.device, dtype=self.run.dtype).to(dtype)

    def scaled(self, kind: str, rotate: bool = True) -> Calls:
        bits = 4 if kind.startswith("int4") else 8
        fp8 = "fp8" in kind
        count = self.run.copies(self.n * self.k * bits // 8) if rotate else 1
        x = self.floats(self.m, FP8) if fp8 else self.codes(self.m)
        if bits == 4:
            w = [pack_int4(self.codes(self.n, -8, 8)) for _ in range(count)]
        else:
            w = [self.floats(self.n, FP8) if fp8 else self.codes(self.n) for _ in range(count)]
        self.operands = x, w[0]
        return [
            lambda w=v: scaled_matmul(
                x, w, self.x_scale, self.w_scale, self.bias, out=self.out, out_dtype=self.run.dtype, config=self.config
            )
            for v in w
        ]

    def weight_only(self, bits: int, rotate: bool = True) -> Calls:
        count = self.run.copies(self.n * self.k * bits // 8) if rotate else 1
        low = -8 if bits == 4 else -128
        codes = [self.codes(self.n, low, -low) for _ in range(count)]
        w = [pack_int4(c) if bits == 4 else c for c in codes]
        scale = torch.rand(self.n, -(-self.k // GROUP), device=self.device) * 0.01 + 0.001
        x = self.floats(self.m, self.run.dtype)
        self.operands = x, w[0], scale
        return [lambda w=v: weight_only_matmul(x, w, scale, group_size=GROUP, out=self.out, config=self.config) for v in w]

    def peer(self, name: str) -> Calls:
        size = {"bf16": 2, "int_mm": 1, "scaled_mm": 1}.get(name, 0.5)
        count = self.run.copies(int(self.n * self.k * size))
        if name == "int_mm":
            x, w = self.codes(self.m), [self.codes(self.n).t() for _ in range(count)]
            return [lambda w=v: torch._int_mm(x, w) for v in w]
        x = self.floats(self.m, FP8 if name == "scaled_mm" else self.run.dtype)
        if name == "bf16":
            w = [self.floats(self.n, self.run.dtype) for _ in range(count)]
            return [lambda w=v: F.linear(x, w) for v in w]
        if name == "scaled_mm":
            one = torch.ones((), device=self.device)
            w = [self.floats(self.n, FP8).t() for _ in range(count)]
            return [lambda w=v: torch._scaled_mm(x, w, one, one, out_dtype=self.run.dtype, use_fast_accum=True) for v in w]
        return getattr(self, name)(x, count)

    def tinygemm(self, x: torch.Tensor, count: int) -> Calls:
        q = torch.randint(0, 256, (self.n, self.k // 2), dtype=torch.uint8, device=self.device)
        packed = [torch.ops.aten._convert_weight_to_int4pack(q.roll(i, 0), 8) for i in range(count)]
        scale = torch.rand(self.k // GROUP, self.n, 2, device=self.device).to(self.run.dtype)
        return [lambda w=v: torch.ops.aten._weight_int4pack_mm(x, w, GROUP, scale) for v in packed]

    def gemlite(self, x: torch.Tensor, count: int) -> Calls:
        from gemlite.helper import A16W4_HQQ_INT  # pyright: ignore[reportMissingImports]

        count = min(count, 8)
        scale, zero = (torch.rand(self.n, self.k // GROUP, device=self.device).to(self.run.dtype) for _ in range(2))
        make = A16W4_HQQ_INT(device=str(self.device), dtype=self.run.dtype)
        layers = [make.from_weights((self.codes(self.n, 0, 16)).to(torch.uint8), scale, zero * 8) for _ in range(count)]
        return [lambda f=layer: f(x) for layer in layers]

    def humming(self, x: torch.Tensor, count: int) -> Calls:
        from humming.layer import HummingLayer  # pyright: ignore[reportMissingImports]

        layers = []
        for _ in range(min(count, 8)):
            layer = HummingLayer(
                shape_n=self.n, shape_k=self.k, weight_config={"dtype": "int4", "group_size": GROUP}, torch_dtype=self.run.dtype
            ).to(self.device)
            layer.load_from_unquantized(self.floats(self.n, self.run.dtype))
            layer.transform()
            layers.append(layer)
        return [lambda f=layer: f(x) for layer in layers]


# --- correctness ------------------------------------------------------------------------------------------------------


def check_linear(run: Run, name: str, linear: Linear, kind: str) -> None:
    """Poisoned output, float64 reference on a sample of the outputs."""
    calls = linear.weight_only(int(kind[1]), False) if kind.startswith("w") else linear.scaled(kind, False)
    calls[0]()
    some = torch.randperm(linear.n, device=run.device)[:192]
    if kind.startswith("w"):
        x, w, scale = linear.operands
        wide = dequantize(w[some], scale[some], linear.k, int(kind[1]), GROUP, torch.float64)
        want = x.double() @ wide.t()
    else:
        x, w = linear.operands
        wide = (
            dequantize(w[some], linear.w_scale[some], linear.k, 4, 0, torch.float64)
            if kind.startswith("int4")
            else (w[some].to(torch.float64) * linear.w_scale[some, None].double())
        )
        want = (x.to(torch.float64) @ wide.t()) * linear.x_scale.double() + linear.bias[some].double()
    error = relative_error(linear.out[:, some], want)
    poisoned = bool(linear.out.isnan().any())
    run.errors[name] = error
    if error > (1e-2 if "fp8" in kind else 4e-3) or poisoned:
        raise AssertionError(f"wrong: relative error {error:.2e}, NaN left {poisoned}")


def check_all(run: Run, shapes: dict[str, tuple[int, int]], rows: tuple[int, ...]) -> None:
    cases = [(s, m) for s in shapes.values() for m in rows]
    cases += [((27, 64), 5), ((300, 3420 // (30 if run.dry else 1)), 33), ((64, 27), 3), ((5, 1), 2)]
    cases += [] if run.dry else [((1280, 4304), 917)]
    for (n, k), m in cases:
        for kind in ("int8", "int4", "w4", "w8") if run.dry else ("int8", "fp8", "int4", "int4_fp8", "w4", "w8"):
            name = f"check/{kind}/{m}x{n}x{k}"
            run.attempt(name, lambda n=n, k=k, m=m, kind=kind, name=name: check_linear(run, name, Linear(run, n, k, m), kind))
    for width in (64, 96) if run.dry else (3584, 5120, 1280, 18944, 4304, 27):
        run.attempt(f"check/rows/{width}", lambda width=width: check_rows(run, width, 5 if run.dry else 333))


# --- tuning -----------------------------------------------------------------------------------------------------------


def tune(run: Run, shapes: dict[str, tuple[int, int]], rows: tuple[int, ...], path: Path, args: argparse.Namespace) -> None:
    """Time every candidate, keep the fastest where it beats the table, write the file."""
    end = min(run.end - 60, time.monotonic() + args.tune_seconds)
    best: dict[str, Tile] = {}
    skinny = {op: kind for op, kind in SKINNY.items() if op in args.ops}
    large = {op: kind for op, kind in LARGE.items() if op in args.ops}
    jobs = [
        (op, kind, m, shape)
        for m in rows
        for op, kind in (skinny if m <= 64 else large).items()
        for shape in shapes
        if worth_tuning(op, m, shape)
    ]
    if "weight_int4" in skinny:
        jobs += [("weight_int4", 4, m, shape) for m in rows if 64 < m <= 256 for shape in shapes if shape.startswith("lm")]
    # A weight that is unpacked once takes the tile of its codes: int8 comes before int4, and is written before.  Then what
    # acceptance looks at: decode and prefill, the two large linears; rows that nobody asks for last.
    jobs.sort(
        key=lambda j: (
            j[0] in PACKED,
            j[2] not in (1, 16, 2048, 8192),
            j[3] not in ("lm.gate_up", "lm.down"),
            j[0] != "weight_int4",
            j[2],
        )
    )
    ahead(run, [(op, m, *shapes[shape]) for op, kind, m, shape in jobs if isinstance(kind, str)])
    for i, (op, kind, m, shape) in enumerate(jobs):
        if i and op in PACKED and jobs[i - 1][0] not in PACKED:
            write_tiles(run, path, best)
        n, k = shapes[shape]
        if time.monotonic() > end:
            run.failures.append(f"tune/{op}/{m}/{shape}: no time left")
            continue
        linear = Linear(run, n, k, m)
        calls = linear.weight_only(kind) if isinstance(kind, int) else linear.scaled(kind)
        tries = [tiles.table(op, m, n, k, run.device), *candidates(op, m, n, k)]
        if op in CLASSIC:
            tries.append(tiles.config(CLASSIC[op], m, n, k, run.device))
        tile = fastest(run, linear, calls, tries, f"tune/{op}/{m}/{shape}", end)
        if tile is not None:
            best[tiles.key(op, m, n, k)] = tile
    write_tiles(run, path, best)


def ahead(run: Run, jobs: list[tuple[str, int, int, int]]) -> None:
    """Compile the kernels of all tiles side by side; of products of int8 and int4 codes, of which there are most."""
    if run.dry:
        return
    few = [job for job in jobs if job[0] in SKINNY or job[1] <= 64]
    compile_ahead.ahead((launch for job in few for launch in launches_of(run, *job)), run.device)
    compile_ahead.wait()


def launches_of(run: Run, op: str, m: int, n: int, k: int) -> Iterator[Launch]:
    """Of every tile that is tried for an op."""
    packed = op in PACKED
    part = Part(n, -(-k // 2) if packed else k, torch.uint8 if packed else torch.int8, run.dtype, run.dtype)
    for tile in candidates(op, m, n, k):
        if tile.variant == "unpack":
            continue
        x: Any = Shape((m, k), torch.int8, run.device)
        linear = by_rows.linear_of(part, m, run.device)
        one: Any = Shape((1,), torch.float32, run.device)
        yield from scaled_kernel.launches(
            x,
            [linear],
            RowScale(ONE.value, one, one),
            scaled_kernel.plan(x, [linear], config=tile),
            new=by_rows.shape_of,
            work=by_rows.shapes_of,
        )


# --- timings ----------------------------------------------------------------------------------------------------------


def contenders(run: Run, m: int) -> list[str]:
    """Who runs at m rows."""
    if run.dry:
        return ["int8", "int4", "w4", "w8", "bf16"]
    names = ["int8", "int4", "int4_fp8", "fp8", "bf16", "scaled_mm"]
    names += ["int_mm"] if m > 16 else []
    return names + (["w4", "w8", "tinygemm"] if m <= 256 else [])


def time_one(run: Run, shape: tuple[int, int], m: int, name: str) -> float:
    linear = Linear(run, *shape, m)
    if name[0] == "w":
        return run.microseconds(linear.weight_only(int(name[1])))
    return run.microseconds(linear.scaled(name) if name in ("int8", "int4", "int4_fp8", "fp8") else linear.peer(name))


def time_linears(run: Run, shapes: dict[str, tuple[int, int]], rows: tuple[int, ...]) -> None:
    jobs = [
        (m, shape, name)
        for m in sorted(rows, key=lambda m: (m not in (1, 2048, 8192), m))
        for shape in shapes
        for name in contenders(run, m)
    ]
    # Peers that tune or compile at their first call come last, on the shapes that acceptance names.
    few = [(m, shape) for m in (1, 16) for shape in ("lm.down", "lm.gate_up") if m in rows and shape in shapes]
    jobs += [(m, shape, name) for name in ("gemlite", "humming") for m, shape in few if not run.dry]
    missing: set[str] = set()
    for m, shape, name in jobs:
        if name in missing:
            continue
        us = run.attempt(f"{shape}/{m} {name}", lambda s=shape, m=m, name=name: time_one(run, shapes[s], m, name))
        if us is not None:
            run.times.setdefault(f"{shape}/{m}", {})[name] = us
        elif "ModuleNotFoundError" in run.failures[-1]:
            missing.add(name)


# --- report -----------------------------------------------------------------------------------------------------------


def table(run: Run, shapes: dict[str, tuple[int, int]], rows: tuple[int, ...]) -> dict[str, float]:
    """Print the table and return the summary."""
    names = ("bf16", "int8", "fp8", "int4", "int4_fp8", "int_mm", "scaled_mm", "w4", "w8", "tinygemm", "gemlite", "humming")
    print("\nmicroseconds    " + "".join(f"{name:>9.9}" for name in names))
    for where, times in run.times.items():
        if not where.startswith(("chain", "groups", "epilogue")):
            print(f"{where:16}" + "".join(f"{times[name]:9.1f}" if name in times else "        -" for name in names))
        else:
            print(where, {name: round(t, 1) for name, t in times.items()})
    print("\nTB/s            " + "  ".join(f"{name} {rate:.2f}" for name, rate in run.bandwidth.items()))
    summary: dict[str, float] = {}

    def ratio(slow: str, fast: str, m: int) -> None:
        pairs = [t for s in shapes if slow in (t := run.times.get(f"{s}/{m}", {})) and fast in t]
        if pairs:
            summary[f"{fast} over {slow}, M={m}"] = geomean([t[slow] / t[fast] for t in pairs])

    for m in rows:
        for slow, fast in (
            ("bf16", "int8"),
            ("bf16", "fp8"),
            ("int8", "int4"),
            ("fp8", "int4_fp8"),
            ("scaled_mm", "fp8"),
            ("tinygemm", "w4"),
            ("bf16", "w4"),
        ):
            ratio(slow, fast, m)
        for shape in ("lm.down", "lm.gate_up"):
            times = run.times.get(f"{shape}/{m}", {})
            if m <= 16 and "w4" in times and shape in shapes:
                n, k = shapes[shape]
                summary[f"w4 TB/s, {shape}, M={m}"] = 1e-6 * n * k * (0.5 + 4 / GROUP) / times["w4"]
                peers = [times[p] for p in ("tinygemm", "gemlite", "humming") if p in times]
                if peers:
                    summary[f"w4 over best peer, {shape}, M={m}"] = min(peers) / times["w4"]
    print("\n".join(f"{value:8.3f}  {name}" for name, value in summary.items()))
    print(f"\n{len(run.failures)} failures; worst error of a check {max(run.errors.values(), default=math.nan):.2e}")
    print("\n".join(f for f in run.failures if not f.startswith("tune/"))[-1500:])
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tune-seconds", type=float, default=240)
    parser.add_argument(
        "--ops", nargs="+", default=list(LARGE | SKINNY), choices=list(LARGE | SKINNY), help="whose tiles are tried"
    )
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--tune-rows", type=int, nargs="+", help="rows that tiles are tried for; by default the same")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES | OTHERS))
    parser.add_argument("--only", choices=("check", "linears", "rows", "chain", "w4a8_groups", "epilogues"), action="append")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    run = Run(args.dry, args.seconds)
    shapes, rows = {name: (SHAPES | OTHERS)[name] for name in args.shapes}, tuple(args.rows)
    if args.dry:
        shapes, rows = {"lm.o": (48, 256), "lm.down": (32, 320)}, (1, 20)
    only = args.only or ("check", "linears", "rows", "chain")
    torch.manual_seed(time.time_ns() % 2**31)
    path = (args.out.parent if args.dry and args.out else tiles.FOLDER) / f"{gpu_name(run.device)}.json"
    run.attempt("ceilings", lambda: ceilings(run))
    if "check" in only:
        sample = {s: shapes[s] for s in ("lm.qkv", "lm.o", "lm.down", "vit.proj") if s in shapes}
        check_all(run, sample, rows if args.dry else tuple(m for m in (1, 16, 256, 917, 2048) if m in rows))
    if "w4a8_groups" in only:
        rows = rows if args.dry or args.rows != list(ROWS) else group_scales.ROWS
        seconds = args.tune_seconds if args.tune and (not args.dry or args.out) else 0
        group_scales.run_groups(run, shapes, rows, seconds, lambda best: write_tiles(run, path, best))
    if args.tune and (not args.dry or args.out) and only != ["w4a8_groups"]:
        run.attempt("tune", lambda: tune(run, shapes, tuple(args.tune_rows or rows), path, args), int(args.seconds))
    chains, tokens = (((48, 64),), 24) if args.dry else (((4608, 3584), (37888, 3584)), 6417)
    parts: dict[str, Callable[[], object]] = {
        "rows": lambda: (time_one_row(run), time_rows(run, 8 if args.dry else 4096)),
        "chain": lambda: [
            time_chain(run, f"chain {n}x{k}/{tokens}", lambda n=n, k=k: Linear(run, n, k, tokens)) for n, k in chains
        ],
        "epilogues": lambda: epilogues.time_epilogues(run, (70,) if args.dry else epilogues.ROWS),
        "linears": lambda: time_linears(run, shapes, rows),
    }
    for part in filter(only.__contains__, parts):
        parts[part]()
    summary = table(run, shapes, rows) | group_scales.summarize(run, rows) | epilogues.summarize(run)
    print("\n".join(f"{value:8.3f}  {name}" for name, value in summary.items() if name[:3] in ("w4_", "w8_", "fus")))
    if args.out:
        result = {
            **facts(run),
            "shapes": shapes,
            "group_size": GROUP,
            "microseconds": run.times,
            "tb_per_s": run.bandwidth,
            "same_bytes_tb_per_s": run.same_bytes,
            "summary": summary,
            "errors": run.errors,
            "tiles": run.tiles,
            "failures": run.failures,
            "configs": json.loads(path.read_text()) if path.exists() else None,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(f.startswith("check/") for f in run.failures) else 0


if __name__ == "__main__":
    sys.exit(main())
