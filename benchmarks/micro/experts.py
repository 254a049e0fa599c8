"""The linears of all experts of a mixture on one GPU: correctness, then medians, ours next to torch's grouped product.

    python -m benchmarks.micro.experts --out results.json [--seconds 300]
    TRITON_INTERPRET=1 python -m benchmarks.micro.experts --dry          every step once, tiny, on the CPU

Rows are spread over the experts at random, so some have none; the offsets stay on the device.  The experts of a decode step do
not fill the L2 cache's worth of copies that gpu_run.py rotates through only where a model has few of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_run import Run, relative_error
from mmqc.kernels.matmul.configs import MatmulConfig
from mmqc.kernels.matmul.grouped_matmul import grouped_matmul
from mmqc.kernels.shared.device_facts import gpu_name
from mmqc.ops.grouped_matmul import reference
from mmqc.ops.pack import pack

SHAPES = {  # name: (experts, chosen, N, K)
    "mixtral.up": (8, 2, 28672, 4096),
    "mixtral.down": (8, 2, 4096, 14336),
    "qwen3_30b.up": (128, 8, 1536, 2048),
    "qwen3_30b.down": (128, 8, 2048, 768),
}
DRY = {"tiny": (4, 2, 40, 96)}
TOKENS = (1, 16, 256, 2048, 8192)
TILES = [
    MatmulConfig(m, n, k, warps, 3, variant="columns")
    for m in (16, 32, 64, 128)
    for n, k, warps in ((64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))
]


class Experts:
    """Operands of one shape and number of tokens."""

    def __init__(self, run: Run, experts: int, chosen: int, n: int, k: int, tokens: int) -> None:
        self.run, self.experts, self.n, self.k = run, experts, n, k
        device, self.rows = run.device, tokens * chosen
        index = torch.rand(tokens, experts, device=device).topk(chosen).indices.flatten().sort().values
        bounds = torch.arange(experts + 1, device=device)
        self.offsets = torch.searchsorted(index, bounds, out_int32=True)
        self.x = torch.randn(self.rows, k, device=device, dtype=run.dtype)
        self.x_q = torch.randint(-128, 128, (self.rows, k), dtype=torch.int8, device=device)
        self.row_scale = torch.rand(self.rows, device=device) * 0.01
        self.out = torch.full((self.rows, n), float("nan"), device=device, dtype=run.dtype)

    def weight(self, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        top = 2 ** (bits - 1)
        shape = (self.experts, self.n, self.k)
        codes = torch.randint(-top, top, shape, dtype=torch.int8, device=self.run.device)
        scale = torch.rand(*shape[:2], *([-(-self.k // group)] if group else []), device=self.run.device) * 0.01
        return codes if bits == 8 else pack(codes, bits), scale

    def zeros(self, scale: torch.Tensor, bits: int, zero: bool) -> torch.Tensor | None:
        top = 2 ** (bits - 1)
        return torch.randint(-top, top, scale.shape, dtype=torch.int8, device=scale.device) if zero else None

    def ours(
        self, bits: int, group: int, integer: bool, zero: bool, config: MatmulConfig | None = None
    ) -> Callable[[], torch.Tensor]:
        w, scale = self.weight(bits, group)
        z = self.zeros(scale, bits, zero)
        x, rows = (self.x_q, self.row_scale) if integer else (self.x, None)
        return lambda: grouped_matmul(
            x,
            w,
            scale,
            self.offsets,
            None,
            rows,
            bits=bits,
            group_size=group,
            out_dtype=self.run.dtype,
            zero=z,
            out=self.out,
            config=config,
        )

    def error(self, bits: int, group: int, integer: bool, zero: bool) -> float:
        w, scale = self.weight(bits, group)
        z = self.zeros(scale, bits, zero)
        x, rows = (self.x_q, self.row_scale) if integer else (self.x, None)
        y = grouped_matmul(x, w, scale, self.offsets, None, rows, bits=bits, group_size=group, out_dtype=self.run.dtype, zero=z)
        wide = torch.float32 if integer else self.run.dtype
        return relative_error(y, reference(x, w, scale, self.offsets, None, rows, bits, group, wide, z))

    def torch_grouped(self) -> Callable[[], torch.Tensor]:
        w = torch.randn(self.experts, self.n, self.k, device=self.run.device, dtype=self.run.dtype)
        return lambda: torch._grouped_mm(self.x, w.mT, offs=self.offsets[1:])


SCHEMES = {  # name: (bits, group, integer inputs, zero points)
    "W4A16-g128": (4, 128, False, False),
    "W4A16-g128-asym": (4, 128, False, True),
    "W8A16": (8, 0, False, False),
    "W4A8": (4, 0, True, False),
    "W8A8": (8, 0, True, False),
}


def median(run: Run, call: Callable[[], object]) -> float:
    """Microseconds a call, in a CUDA graph."""
    if run.dry:
        call()
        return 0.0
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 8)
    return sorted(times)[len(times) // 2]


def measure(run: Run, name: str, shape: tuple[int, int, int, int], tokens: int, tune: bool) -> None:
    """One shape and number of tokens, all schemes."""
    place = run.times.setdefault(f"{name}/{tokens}", {})
    experts = Experts(run, *shape, tokens)
    for scheme, operands in SCHEMES.items():
        error = run.attempt(f"{name}/{tokens} {scheme} error", lambda o=operands: experts.error(*o))
        if error is not None:
            run.errors[f"{name}/{tokens}/{scheme}"] = error
        for config in (None, *(TILES if tune else ())):
            what = scheme if config is None else f"{scheme} {config.block_m}x{config.block_n}x{config.block_k}/{config.num_warps}"
            work = lambda o=operands, c=config: median(run, experts.ours(*o, c))  # noqa: E731
            time = run.attempt(f"{name}/{tokens} {what}", work)
            if time is not None:
                place[what] = time
    if not run.dry:
        time = run.attempt(f"{name}/{tokens} torch", lambda: median(run, experts.torch_grouped()))
        if time is not None:
            place["torch bf16"] = time
    print(f"{name}/{tokens}", {k: round(v, 1) for k, v in place.items()}, flush=True)


def main() -> int:
    """Run; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--tune", action="store_true", help="also time a list of tiles")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args()
    run = Run(args.dry, args.seconds)
    for name, shape in (DRY if args.dry else SHAPES).items():
        for tokens in (3,) if args.dry else TOKENS:
            if run.left() > 0:
                measure(run, name, shape, tokens, args.tune)
    result = {
        "gpu": gpu_name(run.device),
        "torch": torch.__version__,
        "microseconds": run.times,
        "errors": run.errors,
        "failures": run.failures,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print("\n".join(run.failures) or "no failures", {k: f"{v:.1e}" for k, v in run.errors.items()})
    return int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main())
