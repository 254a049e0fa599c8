"""Products of 17 to 512 rows on one GPU: weights widened in registers next to the kernels of pointers and to cuBLAS in bf16.

    python -m benchmarks.micro.some_rows --out benchmarks/results/some_rows.json

Microseconds for all linears of an input, inputs quantized already.  *by pointers* is what a package without Python runs.  Gate and
up also to the codes of silu(gate) up: in one launch where one has both (*to codes*), and with a pass behind their products.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu_run import Calls, Run, arguments, facts
from mmqc.kernels.matmul import gated_rows
from mmqc.kernels.matmul import scaled_matmul as scaled
from mmqc.kernels.matmul import scaled_matmul_epilogue as epilogues
from mmqc.kernels.matmul import weight_only_matmul as weight_only
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.linears import Linear
from mmqc.kernels.matmul.product import EAGER, Caller
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.kernels.warpgroup import packed_gated

INPUTS = {  # columns of the linears of one input, and its channels
    "7B gate, up": ((18944, 18944), 3584),
    "7B down": ((3584,), 18944),
    "7B q, k, v": ((3584, 512, 512), 3584),
    "7B o": ((3584,), 3584),
    "7B head": ((152064,), 3584),
    "half of 72B gate, up": ((14784, 14784), 8192),
    "half of 72B down": ((8192,), 14784),
    "half of 72B q, k, v": ((4096, 512, 512), 8192),
}
ROWS = (32, 64, 128, 256, 512)
BY_POINTERS = Caller(gluon=False)


def runs(launches: Iterable[Launch]) -> Callable[[], None]:
    """All of them, one after the other."""
    kept = list(launches)
    return lambda: [launch.run() for launch in kept] and None


def packed(run: Run, columns: tuple[int, ...], k: int, y: Iterable[Any]) -> list[Linear]:
    """Linears that write y, of new weights."""
    return [Linear(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=run.device),
                   torch.ones(n, device=run.device), None, out) for n, out in zip(columns, y, strict=True)]  # fmt: skip


def w4a8(run: Run, m: int, columns: tuple[int, ...], k: int, caller: Caller) -> Calls:
    """Packed weights and int8 inputs."""
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=run.device)
    rows, y = (
        row_scale(torch.ones(1, device=run.device), m),
        [torch.empty(m, n, dtype=run.dtype, device=run.device) for n in columns],
    )
    found = []
    for _ in range(run.copies(sum(columns) * k // 2)):
        linears = packed(run, columns, k, y)
        found.append(runs(scaled.launches(x, linears, rows, scaled.plan(x, linears, caller))))
    return found


def to_codes(run: Run, m: int, columns: tuple[int, ...], k: int, apart: bool) -> Calls:
    """Gate and up and what follows; ``apart``: products that write both, and a pass."""
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=run.device)
    one, n = row_scale(torch.ones(1, device=run.device), m), columns[0]
    z = [torch.empty(m, n, dtype=run.dtype, device=run.device) for _ in columns]
    y, epilogue, found = torch.empty(m, n, dtype=torch.int8, device=run.device), Epilogue("silu", run.dtype, one), []
    for _ in range(run.copies(sum(columns) * k // 2)):
        if apart:
            written = packed(run, columns, k, z)
            products = scaled.launches(x, written, one, scaled.plan(x, written))
            found.append(runs([*products, gated_rows.launch(*z, y, epilogue)]))
        else:
            linears = packed(run, columns, k, [y, y])
            found.append(runs(epilogues.launches(x, linears, one, epilogue, epilogues.plan(x, linears, run.dtype))))
    return found


def w8a16(run: Run, m: int, columns: tuple[int, ...], k: int, caller: Caller) -> Calls:
    """Weights in 8 bits, a scale a row, and inputs as they are."""
    x = torch.randn(m, k, device=run.device).to(run.dtype)
    y = [torch.empty(m, n, dtype=run.dtype, device=run.device) for n in columns]
    found = []
    for _ in range(run.copies(sum(columns) * k)):
        linears = [Linear(torch.randint(-128, 128, (n, k), dtype=torch.int8, device=run.device),
                          torch.ones(n, device=run.device), None, out) for n, out in zip(columns, y, strict=True)]  # fmt: skip
        products = weight_only.plan(x, linears, 8, caller)
        found.append(runs(weight_only.launch_of(p, x, [linears[i] for i in p.linears], None, 0, 8) for p in products))
    return found


def bf16(run: Run, m: int, columns: tuple[int, ...], k: int) -> Calls:
    """One product of all columns."""
    x = torch.randn(m, k, device=run.device).to(run.dtype)
    weights = [torch.randn(sum(columns), k, device=run.device).to(run.dtype) for _ in range(run.copies(2 * sum(columns) * k))]
    return [lambda w=w: F.linear(x, w) for w in weights]


def ways(name: str, m: int) -> dict[str, Callable[..., Calls]]:
    """Contenders by name; a head stays in 8 bits, and many rows have its weight written out."""
    head, many, pair = "head" in name, m > 256, "gate" in name
    found: dict[str, Callable[..., Calls]] = {"bf16": bf16}
    if not head:
        found |= {"W4A8 by pointers": lambda *a: w4a8(*a, BY_POINTERS), "W4A8": lambda *a: w4a8(*a, EAGER)}
    if pair:
        found |= {"W4A8, a pass": lambda *a: to_codes(*a, apart=True)}
    if pair and packed_gated.takes(m):
        found |= {"W4A8 to codes": lambda *a: to_codes(*a, apart=False)}
    if not many:
        found |= {"W8A16 by pointers": lambda *a: w8a16(*a, BY_POINTERS), "W8A16": lambda *a: w8a16(*a, EAGER)}
    return found


def time_way(run: Run, way: Callable[..., Calls], m: int, columns: tuple[int, ...], k: int) -> float:
    """Microseconds, the weights rotated."""
    return run.microseconds(way(run, m, columns, k), 9, 0.03)


def main() -> None:
    """Time and write."""
    options = arguments(__doc__, 150).parse_args()
    run = Run(options.dry, options.seconds)
    inputs: dict[str, Any] = {"gate, dry": ((48, 48), 64)} if options.dry else INPUTS
    for m in (20,) if options.dry else ROWS:
        for name, (columns, k) in inputs.items():
            row = run.times[f"{name}/{m}"] = {}
            for way, calls in ways(name, m).items():
                timed = functools.partial(time_way, run, calls, m, tuple(columns), k)
                us = run.attempt(f"{name}/{m} {way}", timed)
                if us is not None:
                    row[way] = round(us, 2)
            print(name, m, row, flush=True)
            if options.out:
                result = {**facts(run), "inputs": inputs, "times_us": run.times, "failures": run.failures}
                options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
