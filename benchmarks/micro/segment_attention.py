"""Attention within the segments of a packed sequence on one GPU, next to the kernels of torch: correctness, then medians.

    python -m benchmarks.micro.segment_attention --out benchmarks/results/segment_attention.json [--tune] [--seconds 200]
    python -m benchmarks.micro.segment_attention --dry          every step of the peers once, tiny, on the CPU

One call is one layer.  Peers are torch's backends, for a batch of the same segments where all are of one length and contiguous, and
its variable-length kernel (FlashAttention 2).  "packed" is the kernel of packages, on operands in row-major order, as those are;
"masked" is torch's attention with a mask of T x T, made before, which a package had.  Rates count useful products: 4 D for each
pair of a query and a key of one segment.
``--tune`` times a list of configurations too.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_run import Run, arguments, facts, relative_error
from mmqc.kernels.attention.variable_length import segments

# What it is: query heads, KV heads, channels, lengths of the segments, whether causal.
SHAPES: dict[str, tuple[int, int, int, list[int], bool]] = {
    "Qwen2-VL's tower, 25,600 patches": (16, 16, 80, [25600], False),
    "Qwen2-VL's tower, 3,600 patches": (16, 16, 80, [3600], False),
    "Qwen2-VL's tower, 400 patches": (16, 16, 80, [400], False),
    "Qwen2-VL's tower, 16 images of 1,024 patches": (16, 16, 80, [1024] * 16, False),
    "Qwen2-VL's tower, images of 400 to 8,000 patches": (16, 16, 80, [8000, 400, 3600, 1200, 2500, 700], False),
    "Qwen2.5-VL's tower, windows of 64 in 6,400 patches": (16, 16, 80, [64] * 100, False),
    "SigLIP so400m, 8,192 patches": (16, 16, 72, [8192], False),
    "head 64, 8,192 patches": (16, 16, 64, [8192], False),
    "head 128, 8,192 patches": (16, 16, 128, [8192], False),
    "Qwen2-VL-7B's prompt, 6,417 tokens": (28, 4, 128, [6417], True),
}
KEYS, STAGES = (64, 128), (2, 3)
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
MASKED = 9000  # rows, at most, of a mask
WORST = 1e-2  # relative error of a check


def batched(packed: Tensor, segments: int) -> Tensor:
    """[1, H, T, D] as [segments, H, T / segments, D], contiguous."""
    return packed[0].unflatten(1, (segments, -1)).transpose(0, 1).contiguous()


def sdpa(backend: SDPBackend, packed: Sequence[Tensor], causal: bool) -> Tensor:
    """One of torch's backends."""
    q, k, v = packed
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def varlen(packed: Sequence[Tensor], ends: Tensor, longest: int, causal: bool) -> Tensor:
    """Torch's variable-length kernel on [T, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = packed
    y = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0) if causal else (-1, -1))
    assert isinstance(y, Tensor)
    return y


def bias(ends: Tensor, rows: int, dtype: torch.dtype, causal: bool) -> Tensor:
    """[T, T]: 0 for a query and a key of one segment, else -inf."""
    segment = segments(ends, rows)
    seen = segment[:, None] == segment
    seen = seen.tril() if causal else seen
    return torch.zeros(seen.shape, dtype=dtype, device=ends.device).masked_fill_(~seen, -torch.inf)


def check(run: Run, name: str, y: Tensor, packed: Sequence[Tensor], ends: list[int], causal: bool) -> None:
    """Against float32, segment by segment, a head at a time."""
    q, k, v = packed
    group, worst = q.shape[1] // k.shape[1], 0.0
    for a, b in set(itertools.pairwise(ends)):
        for h in (0, q.shape[1] - 1):
            of = [t[:, i : i + 1, a:b].float() for t, i in ((q, h), (k, h // group), (v, h // group))]
            worst = max(worst, relative_error(y[:, h : h + 1, a:b], sdpa(SDPBackend.MATH, of, causal)))
    run.errors[name] = worst
    if worst > WORST:
        raise AssertionError(f"wrong by {worst:.1e}")


def measure(run: Run, name: str, shape: tuple[int, int, int, list[int], bool], rates: dict[str, Any], tune: bool) -> None:
    """The kernel, its configurations, its peers."""
    heads, of_keys, d, lengths, causal = shape
    edges = [0, *itertools.accumulate(lengths)]
    ends = torch.tensor(edges, dtype=torch.int32, device=run.device)
    q, k, v = packed = [torch.randn(1, h, edges[-1], d, device=run.device).to(run.dtype) for h in (heads, of_keys, of_keys)]
    ways: dict[str, Any] = {}
    if not run.dry:
        from mmqc.kernels.attention.packed_attention import packed_attention
        from mmqc.kernels.attention.segment_attention import Config, segment_attention

        run.attempt(
            f"{name}: check", lambda: check(run, name, segment_attention(q, k, v, ends, causal=causal), packed, edges, causal)
        )
        ways["mmqc"] = lambda: segment_attention(q, k, v, ends, causal=causal)
        for keys, stages in itertools.product(KEYS, STAGES) if tune else ():
            config = Config(keys, stages)
            ways[str(config)] = lambda c=config: segment_attention(q, k, v, ends, causal=causal, config=c)
        by_token = [t[0].transpose(0, 1).contiguous() for t in packed]
        by_head = [t.transpose(0, 1)[None] for t in by_token]
        y = packed_attention(*by_head, ends, causal=causal)
        run.attempt(f"{name}: check of packed", lambda: check(run, f"{name}, packed", y, packed, edges, causal))
        ways["packed"] = lambda: packed_attention(*by_head, ends, causal=causal)
        if edges[-1] <= MASKED:
            mask = bias(ends, edges[-1], q.dtype, causal)
            ways["masked"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != of_keys)
        if heads == of_keys:
            ways["varlen"] = lambda: varlen(by_token, ends, max(lengths), causal)
    if len(set(lengths)) == 1:
        batches = [batched(t, len(lengths)) for t in packed]
        backends = {"math": SDPBackend.MATH} if run.dry else PEERS
        ways |= {label: (lambda b=backend: sdpa(b, batches, causal)) for label, backend in backends.items()}
    times = run.times.setdefault(name, {})
    for label, way in ways.items():
        found = run.attempt(f"{name}: {label}", lambda way=way: run.microseconds([way] * (1 if run.dry else 4), 8, 0.1), 30)
        if found is not None:
            times[label] = found
    useful = 4e-6 * heads * d * sum(n * n for n in lengths) / (2 if causal else 1)
    rates[name] = {label: useful / t for label, t in times.items()}
    print(name, {label: round(rate, 1) for label, rate in rates[name].items()}, flush=True)


def main() -> None:
    parser = arguments(__doc__, 200)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), help="some of the shapes")
    args = parser.parse_args()
    run, rates = Run(args.dry, args.seconds), {}
    for name in args.only:
        heads, of_keys, d, lengths, causal = SHAPES[name]
        lengths = [24] * min(2, len(lengths)) if args.dry else lengths
        measure(run, name, (heads, of_keys, d, lengths, causal), rates, args.tune and not args.dry)
        if args.out:
            found = {**facts(run), "times_us": run.times, "TFLOP/s": rates, "errors": run.errors, "failures": run.failures}
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(run.failures))


if __name__ == "__main__":
    main()
