"""The kernels that make one pass over the rows, for linear.py: correctness, and the bytes that they move in a second."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu_run import Run, relative_error

from mmqc.kernels.hadamard_quantize import hadamard_quantize
from mmqc.kernels.norm_quantize import norm_quantize
from mmqc.norm import RMSNorm
from mmqc.ops import hadamard


def code_error(got: torch.Tensor, want: torch.Tensor) -> float:
    off = (got.int() - want.int()).abs()
    if off.max() > 1:
        raise AssertionError(f"codes off by up to {off.max()}")
    return (off > 0).double().mean().item()


def check_rows(run: Run, width: int, m: int) -> None:
    """norm_quantize and hadamard_quantize: codes next to the plain-torch composition in float32."""
    x = torch.randn(m, width, device=run.device).to(run.dtype)
    scale = torch.full((1,), 0.03, device=run.device)
    y = RMSNorm(width).to(run.device)(x).float()
    rate = code_error(norm_quantize(x, scale).q, torch.round(y / 0.03).clamp(-128, 127))
    h = hadamard.reference(x.float(), [f.to(run.device) for f in hadamard.hadamard_factors(width)])
    got = hadamard_quantize(x, scale)
    more = code_error(got.y, torch.round(h / 0.03).clamp(-128, 127))
    error = relative_error(hadamard_quantize(x, code=None).y, h)
    run.errors[f"rows/{width}"] = error
    if rate > 0.01 or more > 0.1 or error > 8e-3:
        raise AssertionError(f"wrong: norm codes {rate:.1e}, hadamard codes {more:.1e}, hadamard {error:.1e}")


def time_rows(run: Run, m: int) -> None:
    """norm_quantize and hadamard_quantize: TB/s of the bytes that must move."""
    scale, pair = torch.full((1,), 0.02, device=run.device), torch.tensor([0.02, 0.03], device=run.device)
    visual = torch.rand(m, device=run.device) < 0.7
    split = torch.tensor([m // 2], dtype=torch.int32, device=run.device)

    def row(name: str, width: int, item_bytes: int, call: Callable[..., object], factor: int = 1) -> None:
        def work() -> float:
            shape = (m, factor * width)
            xs = [
                torch.randn(shape, device=run.device, dtype=run.dtype)
                for _ in range(run.copies(2 * factor * m * width))
            ]
            outs = [torch.empty(m, width, dtype=torch.int8, device=run.device) for _ in range(2)]
            calls = [lambda x=x, i=i: call(x, outs[i % 2]) for i, x in enumerate(xs)]
            return 1e-6 * m * width * item_bytes / run.microseconds(calls)

        rate = run.attempt(f"{name}/{width}", work)
        if rate is not None:
            run.bandwidth[f"{name}/{width}"] = rate

    for width in (64,) if run.dry else (3584, 1280):
        row("norm_quantize", width, 3, lambda x, out: norm_quantize(x, scale, out=out))
        row("norm_quantize visual", width, 3, lambda x, out: norm_quantize(x, pair, visual=visual, out=out))
        row("norm_quantize split", width, 3, lambda x, out: norm_quantize(x, pair, split=split, out=out))
        row("norm_quantize dynamic", width, 3, lambda x, out: norm_quantize(x, out=out))
        row("norm_quantize residual", width, 7, lambda x, out: norm_quantize(
            x[:, : x.shape[1] // 2], scale, residual=x[:, x.shape[1] // 2 :], out=out), 2)  # fmt: skip
    for width in (64,) if run.dry else (3584, 5120, 18944, 1280, 14336):
        row("hadamard_quantize", width, 3, lambda x, out: hadamard_quantize(x, scale, out=out))
        row("hadamard_quantize dynamic", width, 3, lambda x, out: hadamard_quantize(x, out=out))
        row("silu hadamard_quantize", width, 5, lambda x, out: hadamard_quantize(
            x[:, : x.shape[1] // 2], scale, up=x[:, x.shape[1] // 2 :], out=out), 2)  # fmt: skip
        if width >= 14336 and not run.dry:
            for warps, stages, programs in ((8, 1, 1), (8, 2, 1), (16, 1, 1), (8, 1, 2), (16, 2, 1)):
                row(f"hadamard_quantize {warps}w {stages}s {programs}p", width, 3, lambda x, out, w=warps, s=stages, p=programs:
                    hadamard_quantize(x, scale, out=out, num_warps=w, num_stages=s, programs=132 * p))  # fmt: skip
        elif not run.dry:
            for warps, stages, programs in ((4, 2, 6), (4, 4, 4), (4, 3, 6), (8, 3, 3), (8, 2, 4)):
                row(f"hadamard_quantize {warps}w {stages}s {programs}p", width, 3, lambda x, out, w=warps, s=stages, p=programs:
                    hadamard_quantize(x, scale, out=out, num_warps=w, num_stages=s, programs=132 * p))  # fmt: skip
