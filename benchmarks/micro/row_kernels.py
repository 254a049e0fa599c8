"""The kernels that make one pass over the rows, for linear.py: correctness, and the bytes that they move in a second.

A kernel that moves 15 MB pays the same launch and ramp as a copy of 15 MB, so next to each stands a copy that reads and writes
what it reads and writes, timed in the same way: what is left between the two is the kernel's own.
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_run import Run, relative_error
from mmqc.kernels.hadamard import hadamard_quantize
from mmqc.kernels.hadamard.hadamard_plan import hadamard_plan
from mmqc.kernels.hadamard.hadamard_tiles import Written
from mmqc.kernels.rows import norm_quantize, quantize
from mmqc.kernels.rows.norm_quantize import Norm
from mmqc.kernels.shared.device_facts import multiprocessors
from mmqc.kernels.shared.plan import Plan, Refusal
from mmqc.kernels.shared.row_scale import RowScale, row_scale
from mmqc.nn.norm import RMSNorm
from mmqc.ops import hadamard

NORM = Norm(1e-6)
# By width: cut, warps, stages, programs a multiprocessor.
CANDIDATES = {
    1280: [(cut, 4, s, p) for cut in ((40, 32), (20, 64)) for s, p in ((3, 4), (3, 8), (2, 6))],
    3584: [((56, 64), 4, 3, 5), ((56, 64), 4, 2, 8), ((28, 128), 4, 2, 3), ((28, 128), 8, 3, 2), ((28, 128), 8, 2, 3)],
    5120: [((80, 64), 4, 3, 4), ((80, 64), 4, 2, 4), ((40, 128), 4, 2, 3), ((40, 128), 8, 2, 3), ((40, 128), 8, 1, 3)],
    14336: [((112, 128), 8, 1, 2), ((112, 128), 8, 2, 1), ((112, 128), 16, 2, 1), ((56, 256), 8, 1, 1)],
    18944: [((148, 128), 8, 1, 1), ((148, 128), 8, 2, 1), ((148, 128), 16, 1, 1), ((148, 128), 16, 2, 1)],
}


def launched(plan: Plan | Refusal, **options: int | None) -> Any:
    """Its launches, with these options where they are given."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(plan, Plan):
        plan = plan._replace(launches=tuple(launch._replace(**given) for launch in plan.launches))
    return plan.run()


def norm_codes(x: Tensor, scales: RowScale, out: Tensor, residual: Tensor | None = None, num_warps: int | None = None) -> None:
    """norm_quantize into ``out``."""
    new = lambda width, dtype: out if dtype == torch.int8 else torch.empty(out.shape, dtype=dtype, device=x.device)  # noqa: E731
    launched(norm_quantize.plan(x, NORM._replace(residual=residual), scales, new=new), num_warps=num_warps)


def codes(x: Tensor, scales: RowScale, out: Tensor) -> None:
    """quantize into ``out``."""
    launched(quantize.plan(x, scales, new=lambda width, dtype: out))


def hadamard_codes(x: Tensor, scales: RowScale, out: Tensor, up: Tensor | None = None, num_warps: int | None = None) -> None:
    """hadamard_quantize into ``out``."""
    new = lambda width, dtype: out if dtype == torch.int8 else torch.empty(out.shape, dtype=dtype, device=x.device)  # noqa: E731
    launched(hadamard_quantize.plan(x, up, hadamard_plan, scales, 8, torch.int8, new), num_warps=num_warps)


def code_error(got: torch.Tensor, want: torch.Tensor) -> float:
    off = (got.int() - want.int()).abs()
    if off.max() > 1:
        raise AssertionError(f"codes off by up to {off.max()}")
    return (off > 0).double().mean().item()


def check_rows(run: Run, width: int, m: int) -> None:
    """quantize, norm_quantize and hadamard_quantize: codes next to the plain-torch composition in float32."""
    x = torch.randn(m, width, device=run.device).to(run.dtype)
    scale = torch.full((1,), 0.03, device=run.device)
    y = RMSNorm(width).to(run.device)(x).float()
    scales = row_scale(scale, m)
    if not torch.equal(quantize.plan(x, scales).run(), torch.round(x.float() / scale).clamp(-128, 127).to(torch.int8)):
        raise AssertionError("wrong: codes")
    rate = code_error(norm_quantize.plan(x, NORM, scales).run().q, torch.round(y / 0.03).clamp(-128, 127))
    h = hadamard.reference(x.float(), [f.to(run.device) for f in hadamard.hadamard_factors(width)])
    got = hadamard_quantize.plan(x, None, hadamard_plan, scales, 8, torch.int8).run()
    more = code_error(got, torch.round(h / 0.03).clamp(-128, 127))
    error = relative_error(hadamard_quantize.plan(x, None, hadamard_plan).run(), h)
    run.errors[f"rows/{width}"] = error
    if rate > 0.01 or more > 0.1 or error > 8e-3:
        raise AssertionError(f"wrong: norm codes {rate:.1e}, hadamard codes {more:.1e}, hadamard {error:.1e}")


@triton.jit
def move_kernel(x_ptr, q_ptr, sum_ptr, size, TWO: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr):
    """q = x, or x[0] + x[1] with TWO, as int8; the sum is written out too with SUM."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if TWO:
        x = (x.to(tl.float32) + tl.load(x_ptr + size + at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
    if SUM:
        tl.store(sum_ptr + at, x, mask=mask)
    tl.store(q_ptr + at, x.to(tl.float32).to(tl.int8), mask=mask)


def move(x: Tensor, q: Tensor, item_bytes: int, block: int) -> None:
    """A copy of as many bytes an entry of q: 3 (x, q), 5 (two of x) or 7 (two of x, and their sum)."""
    total = torch.empty(q.shape, dtype=x.dtype, device=x.device) if item_bytes == 7 else x
    move_kernel[(triton.cdiv(q.numel(), block),)](
        x, q, total, q.numel(), TWO=item_bytes > 3, SUM=item_bytes == 7, BLOCK=block, num_warps=8
    )


def quantize_in_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm and one int8 scale a token, as dynamic quantization is written in torch."""
    y = F.rms_norm(x, (x.shape[1],)).float()
    tokens = y.abs().amax(1) / 127
    return torch.round(y / tokens[:, None]).to(torch.int8), tokens


class RowTimes:
    """TB/s of a kernel at m rows, and of a copy of the same bytes."""

    def __init__(self, run: Run, m: int):
        self.run, self.m = run, m
        self.copied: dict[tuple[int, int], float | None] = {}

    def rate(self, width: int, item_bytes: int, call: Callable[[Tensor, Tensor], object], factor: int) -> float:
        """Inputs [m, factor width] and codes [m, width], rotated."""
        run, m = self.run, self.m
        size = (m, factor * width)
        xs = [torch.randn(size, device=run.device, dtype=run.dtype) for _ in range(run.copies(2 * factor * m * width))]
        outs = [torch.empty(m, width, dtype=torch.int8, device=run.device) for _ in range(2)]
        calls = [lambda x=x, i=i: call(x, outs[i % 2]) for i, x in enumerate(xs)]
        return 1e-6 * m * width * item_bytes / run.microseconds(calls)

    def copy_rate(self, width: int, item_bytes: int, factor: int) -> float | None:
        """The best of some copies, as in ``ceilings``."""
        if (width, item_bytes) not in self.copied:
            ways = [lambda x, out, b=block: move(x, out, item_bytes, b) for block in (2048, 4096, 8192)]
            ways += [lambda x, out: out.copy_(x)] if item_bytes == 3 else []
            found = [
                self.run.attempt(
                    f"copy of {item_bytes} bytes/{width}, way {i}", lambda way=way: self.rate(width, item_bytes, way, factor)
                )
                for i, way in enumerate(ways)
            ]
            self.copied[width, item_bytes] = max((rate for rate in found if rate is not None), default=None)
        return self.copied[width, item_bytes]

    def row(self, name: str, width: int, item_bytes: int, call: Callable[[Tensor, Tensor], object], factor: int = 1) -> None:
        """Time one kernel and its copy."""
        rate = self.run.attempt(f"{name}/{width}", lambda: self.rate(width, item_bytes, call, factor))
        copied = self.copy_rate(width, item_bytes, factor)
        if rate is not None:
            self.run.bandwidth[f"{name}/{width}"] = rate
            if copied is not None:
                self.run.same_bytes[f"{name}/{width}"] = copied


def time_rows(run: Run, m: int) -> None:
    """quantize, norm_quantize and hadamard_quantize."""
    one = row_scale(torch.full((1,), 0.02, device=run.device), m)
    pair = row_scale(torch.tensor([0.02, 0.03], device=run.device), m, torch.rand(m, device=run.device) < 0.7)
    row = RowTimes(run, m).row
    for width in (64,) if run.dry else (3584, 1280):
        row("norm_quantize", width, 3, lambda x, out: norm_codes(x, one, out))
        row("norm_quantize visual", width, 3, lambda x, out: norm_codes(x, pair, out))
        row(
            "norm_quantize residual",
            width,
            7,
            lambda x, out: norm_codes(x[:, : x.shape[1] // 2], one, out, x[:, x.shape[1] // 2 :]),
            2,
        )
    for width in (64,) if run.dry else (3584, 1280, 5120, 18944):
        row("quantize", width, 3, lambda x, out: codes(x, one, out))
        row("quantize visual", width, 3, lambda x, out: codes(x, pair, out))
    for width in (64,) if run.dry else (3584, 5120, 18944, 1280, 14336):
        row("hadamard_quantize", width, 3, lambda x, out: hadamard_codes(x, one, out))
        row(
            "silu hadamard_quantize",
            width,
            5,
            lambda x, out: hadamard_codes(x[:, : x.shape[1] // 2], one, out, x[:, x.shape[1] // 2 :]),
            2,
        )
        for cut, warps, stages, programs in () if run.dry else CANDIDATES.get(width, ()):
            plan = hadamard_plan(width, run.device, run.dtype, cut)
            name = f"hadamard_quantize {cut[0]}x{cut[1]} {warps}w {stages}s {programs}p"
            row(
                name,
                width,
                3,
                lambda x, out, p=plan, w=warps, s=stages, n=programs: (
                    hadamard_quantize.rows_launch(x, None, Written(out, one), p, n * multiprocessors(x.device))
                    ._replace(num_warps=w, num_stages=s)
                    .run()
                ),
            )
    for width in () if run.dry else (3584, 1280):
        for warps in (1, 2, 4, 8):
            row(f"norm_quantize {warps}w", width, 3, lambda x, out, w=warps: norm_codes(x, one, out, num_warps=w))


def time_one_row(run: Run) -> None:
    """Microseconds of a transform of one row, by the kernel for few rows and by the one for many."""
    scale = row_scale(torch.full((1,), 0.02, device=run.device), 1)

    def slices(x: Tensor, up: Tensor | None = None, num_warps: int | None = None) -> None:
        hadamard_codes(x, scale, torch.empty_like(x, dtype=torch.int8), up, num_warps)

    def one_program(x: Tensor, up: Tensor | None = None) -> None:
        matrices = hadamard_plan(x.shape[1], x.device, x.dtype)
        hadamard_quantize.rows_launch(x, up, Written(torch.empty_like(x, dtype=torch.int8), scale), matrices, 1).run()

    for width in (64,) if run.dry else (3584, 5120, 18944):
        x, up = (torch.randn(1, width, device=run.device).to(run.dtype) for _ in range(2))
        ways = {
            "slices": lambda x=x: slices(x),
            "slices 8w": lambda x=x: slices(x, num_warps=8),
            "one program": lambda x=x: one_program(x),
            "silu slices": lambda x=x, up=up: slices(x, up),
            "silu slices 8w": lambda x=x, up=up: slices(x, up, 8),
            "silu one program": lambda x=x, up=up: one_program(x, up),
        }
        for name, way in ways.items():
            time = run.attempt(f"one row {name}/{width}", lambda way=way: run.microseconds([way] * 20))
            if time is not None:
                run.times.setdefault(f"hadamard_quantize {width}/1", {})[name] = time
