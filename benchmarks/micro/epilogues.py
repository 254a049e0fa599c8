"""What stands between two linears, in the epilogue of the first or behind it, for linear.py: microseconds under torch.compile.

    vit   5120 x 1280, an activation, codes for the next linear; or a Hadamard between the two
    lm    18944 x 3584 twice (gate and up), SiLU, product, codes; or a Hadamard between the two
    down  3584 x 18944 and a term of low rank, the residual, a norm, codes

*fused* is what the backend compiles, *unfused* the same without fuse_epilogues: both start from the first linear's codes and end
with the codes that the next one reads.  *tile* is the fused kernel alone, by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_run import Calls, Run
from mmqc import pipeline
from mmqc.backend import backend, collect_records
from mmqc.kernels.matmul.configs import MatmulConfig as Tile
from mmqc.kernels.matmul.epilogue_tiles import Epilogue
from mmqc.kernels.matmul.scaled_matmul import Linear
from mmqc.kernels.matmul.scaled_matmul_epilogue import scaled_matmul_epilogue
from mmqc.kernels.shared.row_scale import row_scale
from mmqc.ops.hadamard_matrix import hadamard_factors
from mmqc.ops.pack import pack_int4
from mmqc.ops.scaled_matmul_epilogue import quick_gelu
from mmqc.passes.fuse_epilogues import FuseEpilogues

ROWS = (2048, 8192)
RANK = 4
SHAPES = {"vit": (5120, 1280), "lm": (18944, 3584)}  # (N, K) of one linear
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
CASES = [  # shape, activation, bits, Hadamard
    ("vit", "quick_gelu", 8, False),
    ("vit", "gelu", 8, False),
    ("vit", "gelu_tanh", 8, False),
    ("vit", "relu", 8, False),
    ("vit", "quick_gelu", 4, False),
    ("vit", "quick_gelu", 8, True),
    ("vit", "quick_gelu", 4, True),
    ("lm", "silu", 8, False),
    ("lm", "silu", 4, False),
    ("lm", "silu", 8, True),
    ("lm", "silu", 4, True),
]
TILES = (
    Tile(128, 256, 128, 8, 4, variant="nested"),
    Tile(128, 128, 128, 4, 3, per_sm=2, variant="nested"),
    Tile(128, 256, 64, 8, 3, variant="columns"),
    Tile(128, 128, 64, 8, 4, variant="columns"),
    Tile(128, 128, 64, 4, 4, variant="columns"),
)


def compiled(function: Callable[..., Any], first: tuple[Any, ...], fused: bool) -> tuple[Callable[..., Any], Any]:
    """The backend's code, with the pass or without, and what it gives for the first operands."""
    whole = pipeline.run_time_passes

    def passes(*args: Any, **content: Any) -> tuple[Any, ...]:
        return tuple(p for p in whole(*args, **content) if fused or not isinstance(p, FuseEpilogues))

    torch._dynamo.reset()
    made = torch.no_grad()(torch.compile(function, backend=backend, dynamic=False, fullgraph=True))
    with mock.patch.object(pipeline, "run_time_passes", passes), collect_records() as records:
        result = made(*first)
    if ("scaled_matmul_epilogue" in records[-1].ops) != fused:
        raise AssertionError(f"compiled to {dict(records[-1].ops)}")
    return made, result


class Case:
    """Operands on the device, and the ways to compute the next codes."""

    def __init__(self, run: Run, shape: str, act: str, bits: int, hadamard: bool, m: int):
        n, k = (96, 64) if run.dry else SHAPES[shape]
        self.run, self.act, self.bits, self.m, self.n = run, act, bits, m, n
        self.linears, device = 2 if shape == "lm" else 1, run.device
        self.x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
        top = 2 ** (bits - 1)
        copies = max(2, run.copies(self.linears * n * k * bits // 8))

        def weight() -> Tensor:
            codes = torch.randint(-top, top, (n, k), dtype=torch.int8, device=device)
            return codes if bits == 8 else pack_int4(codes)

        self.weights = [[weight() for _ in range(self.linears)] for _ in range(copies)]
        self.w_scale = [torch.rand(n, device=device) / (20 * top * k**0.5) for _ in range(self.linears)]
        self.bias = None if shape == "lm" else torch.randn(n, device=device).to(run.dtype)
        self.one, self.pair = torch.ones(1, device=device), torch.tensor([0.02, 0.03], device=device)
        self.visual = torch.rand(m, device=device) < 0.7
        self.factors = [f.float().to(device) for f in hadamard_factors(n)] if hadamard else []

    def compiled(self, fused: bool) -> Calls:
        """The backend's code, with the pass or without."""
        act, linears, bits, dtype = ACTS[self.act], self.linears, self.bits, self.run.dtype
        ops = torch.ops.mmqc

        def between(
            x: Tensor,
            w: list[Tensor],
            s: list[Tensor],
            bias: Tensor | None,
            one: Tensor,
            pair: Tensor,
            visual: Tensor,
            factors: list[Tensor],
        ) -> Tensor:
            z = [ops.scaled_matmul(x, w[i], one, s[i], bias, None, bits, dtype) for i in range(linears)]
            h = act(z[0])
            h = h * z[1] if linears == 2 else h
            h = ops.hadamard(h, factors) if factors else h
            return ops.quantize(h, pair, visual, 8)

        rest = (self.w_scale, self.bias, self.one, self.pair, self.visual, self.factors)
        function, self.codes = compiled(between, (self.x, self.weights[0], *rest), fused)
        return [lambda w=w: function(self.x, w, *rest) for w in self.weights]

    def alone(self, tile: Tile) -> Calls:
        """The fused kernel with a tile, into codes, or into bf16 where a transform follows."""
        dtype = self.run.dtype if self.factors else torch.int8
        y = torch.empty(self.m, self.n, dtype=dtype, device=self.x.device)
        codes = None if self.factors else row_scale(self.pair, self.m, visual=self.visual)
        epilogue, rows = Epilogue(self.act, self.run.dtype, codes), row_scale(self.one, self.m)

        def call(w: list[Tensor]) -> None:
            linears = [Linear(v, s, self.bias, y) for v, s in zip(w, self.w_scale, strict=True)]
            scaled_matmul_epilogue(self.x, linears, rows, epilogue, tile)

        return [lambda w=w: call(w) for w in self.weights]


def check(run: Run, name: str, fused: Tensor, unfused: Tensor) -> None:
    """The codes of both ways: their mean difference in codes goes to the run's errors.

    The ways round silu(gate) ∘ up once or three times in front of a Hadamard transform: that alone is 0.14 (simulated in float64).
    """
    off = (fused.int() - unfused.int()).abs()
    run.errors[name] = off.double().mean().item()
    if off.max() > 2 or run.errors[name] > 0.2:
        raise AssertionError(f"codes off by up to {off.max()}, {run.errors[name]:.1e} on average")


def time_case(run: Run, name: str, case: Case) -> dict[str, float]:
    """Both ways, then the tiles that fit the weights."""
    times: dict[str, float] = {}
    codes: dict[str, Tensor] = {}
    for way in ("unfused", "fused"):  # one after the other: compiling anew drops what was compiled before
        times[way] = run.microseconds(case.compiled(way == "fused"))
        codes[way] = case.codes
    check(run, f"check/{name}", codes["fused"], codes["unfused"])
    for tile in TILES:
        if (tile.variant == "columns") == (case.bits == 4):
            way = f"tile {tile.block_m}x{tile.block_n} {tile.num_warps}w"
            us = run.attempt(f"{name} {way}", lambda tile=tile: run.microseconds(case.alone(tile)))
            times |= {} if us is None else {way: us}
    return times


def time_low_rank(run: Run, m: int, bits: int) -> dict[str, float]:
    """W x + W_S x_S with the residual and the norm behind it, to the codes of the next linear."""
    (n, k), device, dtype, ops = (64, 96) if run.dry else (3584, 18944), run.device, run.dtype, torch.ops.mmqc
    top = 2 ** (bits - 1)
    codes = [torch.randint(-top, top, (n, k), dtype=torch.int8, device=device) for _ in range(2)]
    weights = [c if bits == 8 else pack_int4(c) for c in codes]
    x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device)
    low_x, low_w, residual = (torch.randn(*size, device=device).to(dtype) for size in ((m, RANK), (n, RANK), (m, n)))
    rest = (torch.rand(n, device=device) / (20 * top * k**0.5), torch.ones(1, device=device), low_x, low_w, residual)

    def behind(x: Tensor, w: Tensor, s: Tensor, one: Tensor, low_x: Tensor, low_w: Tensor, residual: Tensor) -> Any:
        y = ops.scaled_matmul(x, w, one, s, None, None, bits, dtype) + F.linear(low_x, low_w)
        total = residual + y
        return ops.quantize(F.rms_norm(total, (n,)), one * 0.03, None, 8), total

    times, results = {}, []
    for way, fused in (("unfused", False), ("fused", True)):
        function, result = compiled(behind, (x, weights[0], *rest), fused)
        results.append(result[0])
        times[way] = run.microseconds([lambda w=w, f=function: f(x, w, *rest) for w in weights])
    check(run, f"check/low rank w{bits}/{m}", *results)
    return times


def time_epilogues(run: Run, rows: tuple[int, ...]) -> None:
    """Every case."""
    for m in rows:
        for shape, act, bits, hadamard in CASES:
            name = f"epilogue {shape} w{bits} {act}{' hadamard' if hadamard else ''}/{m}"
            made = run.attempt(name, lambda a=(shape, act, bits, hadamard, m): Case(run, *a))
            times = made and run.attempt(name, lambda n=name, c=made: time_case(run, n, c), 180)
            if times:
                run.times[name] = times
        for bits in (8, 4):
            name = f"epilogue lm.down w{bits} low rank/{m}"
            times = run.attempt(name, lambda m=m, bits=bits: time_low_rank(run, m, bits), 180)
            if times:
                run.times[name] = times


def summarize(run: Run) -> dict[str, float]:
    """How many times as fast fused as unfused."""
    found = {name: t for name, t in run.times.items() if name.startswith("epilogue ")}
    return {f"fused over unfused, {name.removeprefix('epilogue ')}": t["unfused"] / t["fused"] for name, t in found.items()}
