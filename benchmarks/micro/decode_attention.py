"""Attention of a decode step over a static cache on one GPU, next to the kernels of torch: correctness, then medians.

    python -m benchmarks.micro.decode_attention --out benchmarks/results/decode_attention.json [--seconds 200]
    TRITON_INTERPRET=1 python -m benchmarks.micro.decode_attention --dry          every step once, tiny, on the CPU

A cache has room for ``tokens``, of which a bool mask shows the first ``used``.  One call is one layer; copies rotate so that the L2
cache holds none of them.  Peers get the same operands, the mask too, from each of torch's backends that
takes them; the best counts.  Other tiles: decode_tiles.py.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_run import Run, arguments, facts, relative_error
from mmqc.kernels.kv.decode_attention import FEW, HALF, SMALL, WHOLE, Config, decode_attention
from mmqc.ops import decode_attention as op

# What it is: batch, KV heads, query heads of each, tokens that the cache has room for, tokens in it.
SHAPES = {
    "Qwen2-VL-7B, batch 1": (1, 4, 7, 2048, 1000),
    "Qwen2-VL-7B, batch 1, nearly full": (1, 4, 7, 1024, 950),
    "Qwen2-VL-7B, batch 1, one of two ranks": (1, 2, 7, 1024, 950),
    "Qwen2-VL-7B, batch 1, long": (1, 4, 7, 8192, 6500),
    "Qwen2-VL-7B, batch 16": (16, 4, 7, 512, 400),
    "Qwen2-VL-7B, batch 64": (64, 4, 7, 512, 400),
    "Qwen2-VL-7B, batch 64, long": (64, 4, 7, 1024, 1000),
    "Qwen2-VL-72B, batch 16": (16, 8, 8, 1024, 1000),
    "Qwen2-VL-72B, batch 16, one of two ranks": (16, 4, 8, 1024, 1000),
    "InternVL2.5-8B, batch 1": (1, 8, 4, 2048, 1000),
    "LLaVA-1.5-7B, batch 1": (1, 32, 1, 2048, 1000),
    "LLaVA-1.5-7B, batch 64": (64, 32, 1, 512, 400),
}
TILES = {"few": FEW, "small": SMALL, "whole": WHOLE, "half": HALF}
WIDTH = 128
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def operands(run: Run, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Those of the op for one layer."""
    batch, heads, group, tokens, used = shape
    q = torch.randn(batch, heads, group, WIDTH, device=run.device).to(run.dtype)
    k, v = (torch.randn(batch, heads, tokens, WIDTH, device=run.device).to(run.dtype) for _ in range(2))
    mask = (torch.arange(tokens, device=run.device) < used).expand(batch, 1, 1, tokens).contiguous()
    return q, k, v, mask, WIDTH**-0.5


def check(run: Run, name: str, given: tuple[Any, ...], config: Config | None = None) -> None:
    """Against the op's reference."""
    error = relative_error(decode_attention(*given, config=config), op.reference(*given))  # type: ignore[arg-type]
    run.errors[f"{name}, {config or 'default'}"] = error
    if error > 1e-2:
        raise AssertionError(f"wrong by {error:.1e}")


def peer(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One of torch's."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


def measure(run: Run, name: str, shape: tuple[int, ...]) -> None:
    """The kernel, its tiles, its peers."""
    batch, heads, _, tokens, used = shape
    layers = [operands(run, shape) for _ in range(run.copies(4 * batch * heads * tokens * WIDTH))]
    times = run.times.setdefault(name, {})
    run.attempt(f"{name}: check", lambda: check(run, name, layers[0]))
    ways: dict[str, Any] = {"mmqc": lambda p: decode_attention(*p)}
    ways |= {label: (lambda p, b=backend: peer(b, *p)) for label, backend in PEERS.items()}
    ways |= {f"mmqc, {label}": (lambda p, c=c: decode_attention(*p, config=c)) for label, c in TILES.items()}
    for label, way in ways.items():
        found = run.attempt(f"{name}: {label}", lambda way=way: run.microseconds([lambda p=p: way(p) for p in layers], 8, 0.02), 30)
        if found is not None:
            times[label] = found
    best = min((times[label] for label in PEERS if label in times), default=float("nan"))
    read = 4e-6 * batch * heads * used * WIDTH
    run.bandwidth[name] = read / times["mmqc"] if "mmqc" in times else 0.0
    print(f"{name}: {times.get('mmqc', 0):.1f} us, {run.bandwidth[name]:.2f} TB/s; torch {best:.1f}", flush=True)


def main() -> None:
    parser = arguments(__doc__, 200)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), help="some of the shapes")
    args = parser.parse_args()
    run = Run(args.dry, args.seconds)
    for name in args.only:
        _, _, group, _, _ = SHAPES[name]
        measure(run, name, (2, 1, group, 96, 40) if args.dry else SHAPES[name])
        if args.out:
            found = {**facts(run), "times_us": run.times, "TB/s": run.bandwidth, "errors": run.errors, "failures": run.failures}
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(run.failures))


if __name__ == "__main__":
    main()
