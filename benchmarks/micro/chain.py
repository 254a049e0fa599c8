"""norm -> quantize -> linear, for linear.py: one static scale, one per modality, and a scale per token by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_run import Run
from benchmarks.micro.row_kernels import NORM, quantize_in_torch
from mmqc.kernels.matmul.scaled_matmul import scaled_matmul
from mmqc.kernels.rows import norm_quantize
from mmqc.kernels.shared.row_scale import row_scale


def chain_calls(run: Run, linear: Any) -> dict[str, Callable[[], None]]:
    """The ways, of one linear.py's ``Linear``."""
    linear.scaled("int8", rotate=False)
    m, w, x = linear.m, linear.operands[1], torch.randn(linear.m, linear.k, device=run.device).to(run.dtype)
    one, pair = torch.full((1,), 0.02, device=run.device), torch.tensor([0.02, 0.03], device=run.device)
    visual = torch.rand(m, device=run.device) < 0.7

    compiled = torch.compile(quantize_in_torch, dynamic=False)

    def multiply(q: torch.Tensor, scale: torch.Tensor, **rows: Any) -> None:
        scaled_matmul(q, w, scale, linear.w_scale, linear.bias, out=linear.out, out_dtype=run.dtype, **rows)

    def chain(scale: torch.Tensor, **rows: Any) -> None:
        multiply(norm_quantize.plan(x, NORM, row_scale(scale, m, **rows)).run().q, scale, **rows)

    return {
        "one": lambda: chain(one),
        "visual": lambda: chain(pair, visual=visual),
        "dynamic, eager torch": lambda: multiply(*quantize_in_torch(x)),
        "dynamic, torch.compile": lambda: multiply(*compiled(x)),
    }


def time_chain(run: Run, where: str, make: Callable[[], Any]) -> None:
    """Each way has a time limit of its own: one of them compiles."""
    calls = run.attempt(where, lambda: chain_calls(run, make()))
    for name, call in (calls or {}).items():
        us = run.attempt(f"{where} {name}", lambda call=call: run.microseconds([call, call]), 120)
        if us is not None:
            run.times.setdefault(where, {})[name] = us
