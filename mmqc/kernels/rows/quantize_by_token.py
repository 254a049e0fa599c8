"""Per-token symmetric quantization, int8 or float8: a row in registers.

    s = max |x| / t     q = round(x / s), t = 127     or, in float8, q = fp8e4nv(x / s), t = 448          (ops/token_matmul.py)

Shapes:  x [M, D] fp16 | bf16 | fp32   q int8 or float8_e4m3fn [M, D]   s float32 [M]   D <= 65,536
Bytes:   one read and one write of every element.
Arch:    Ampere and newer; float8 from compute capability 8.9.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import fp8_reason, why_not_here
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.plan import New, Plan, Refusal, rows_like, why_not_rows
from mmqc.kernels.shared.quantize_codes import quantize_tile

FP8 = torch.float8_e4m3fn
LANE = 128  # channels of a lane, at most
LEAST = 1e-12  # a token's scale (ops/token_matmul.py)


class Tokens(NamedTuple):
    """Codes [M, D] and scales float32 [M, 1]."""

    q: Tensor
    scale: Tensor


@triton.jit
def quantize_by_token_kernel(
    x_ptr, q_ptr, scale_ptr, D, stride_x, stride_q,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):
    """One row: its largest entry, its codes."""
    row = tl.program_id(0)
    wide, at = row.to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + wide * stride_x + at, mask=at < D, other=0.0).to(tl.float32)  # [BLOCK]
    s = tl.maximum(tl.div_rn(tl.max(tl.abs(x)), LARGEST), LEAST)
    tl.store(q_ptr + wide * stride_q + at, quantize_tile(x, s, -128.0, 127.0, FP8), mask=at < D)
    tl.store(scale_ptr + row, s)


def why_not(x: Tensor, code: torch.dtype) -> str | None:
    """None, or why these operands cannot be quantized here."""
    return why_not_rows(x) or why_not_here(x) or (fp8_reason(x.device) if code == FP8 else None)


def plan(x: Tensor, code: torch.dtype, new: New | None = None) -> Plan[Tokens] | Refusal:
    """One launch, of a program a row; ``code``: int8 or float8_e4m3fn."""
    if reason := why_not(x, code):
        return Refusal(reason)
    (m, width), new = x.shape, new or rows_like(x)
    out = Tokens(new(width, code), new(1, torch.float32))
    block = triton.next_power_of_2(width)
    args = dict(
        x_ptr=x, q_ptr=out.q, scale_ptr=out.scale, D=width, stride_x=x.stride(0), stride_q=out.q.stride(0),
    )
    constants = dict(LARGEST=448.0 if code == FP8 else 127.0, LEAST=LEAST, FP8=code == FP8, BLOCK=block)
    warps = min(16, max(1, block // (32 * LANE)))
    return Plan((Launch(quantize_by_token_kernel, (m,), args, constants, ("q_ptr", "scale_ptr"), warps, 1, block_rows=1),), out)
