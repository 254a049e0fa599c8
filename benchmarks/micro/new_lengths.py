"""Attention of a length that never came: the first call, and later ones, of torch's backends and of our kernel, on one GPU.

    python -m benchmarks.micro.new_lengths --out benchmarks/results/new_lengths.json
    python -m benchmarks.micro.new_lengths --dry          every step once, tiny, on the CPU

cuDNN builds a plan for every shape, in every thread, and compiles a kernel where a plan wants one that it has not: a prompt with an
image of a new size waits for that.  The first call is by the clock, milliseconds, after one of another length; the later ones are
microseconds on the device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_run import Run, arguments, facts
from mmqc import kernels

# What it is: query heads, KV heads, channels, whether causal.
HEADS = {"Qwen2-VL's tower": (16, 16, 80, False), "Qwen2-VL-7B's prompt": (28, 4, 128, True)}
LENGTHS = (600, 81, 128, 256, 305, 311, 347, 400, 512, 721, 917, 1152, 1536, 2048, 3077)  # the first is the other length
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def operands(run: Run, heads: tuple[int, int, int, bool], length: int) -> tuple[Tensor, ...]:
    """Those of a layer [1, H, T, D], in memory as a model has them: [1, T, H, D]."""
    many, few, width, _ = heads
    return tuple(torch.randn(1, length, n, width, device=run.device).to(run.dtype).transpose(1, 2) for n in (many, few, few))


def calls(run: Run, heads: tuple[int, int, int, bool], length: int) -> dict[str, Callable[[], Any]]:
    """One attention by everyone."""
    q, k, v = operands(run, heads, length)
    causal, shared = heads[3], heads[0] != heads[1]

    def by(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)

    found: dict[str, Callable[[], Any]] = {
        name: (lambda backend=backend: by(backend)) for name, backend in BACKENDS.items() if (name == "math") == run.dry
    }
    if not run.dry and kernels.install():
        from mmqc.kernels.attention.segment_attention import segment_attention

        ends = torch.tensor([0, length], device=run.device, dtype=torch.int32)
        found["mmqc"] = lambda: segment_attention(q, k, v, ends, causal=causal)
    return found


def main() -> None:
    """Time and write."""
    options = arguments(__doc__, 120).parse_args()
    run = Run(options.dry, options.seconds)
    wait = (lambda: None) if options.dry else torch.cuda.synchronize
    first: dict[str, dict[str, float]] = {}
    for name, heads in HEADS.items():
        for length in LENGTHS[:2] if options.dry else LENGTHS:
            where = f"{name}, {length}"
            for who, call in calls(run, heads, length).items():
                wait()
                start = time.perf_counter()
                if run.attempt(f"{where}, {who}", call) is None:
                    continue
                wait()
                first.setdefault(where, {})[who] = round(1e3 * (time.perf_counter() - start), 3)
                us = run.attempt(f"{where}, {who}", lambda call=call: run.microseconds([call], replays=9, budget=0.02))
                if us is not None:
                    run.times.setdefault(where, {})[who] = round(us, 2)
            print(where, "first, ms", first.get(where), "then, us", run.times.get(where), flush=True)
    print("\n".join(run.failures[:5]))
    if options.out:
        result = {**facts(run), "first_ms": first, "times_us": run.times, "failures": run.failures}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
