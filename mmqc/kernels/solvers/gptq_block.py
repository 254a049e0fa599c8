"""The inner loop of GPTQ for one block of channels, in registers.

    for i = 0 ... B-1:   q_i = clamp(round(w_i / s_i + z_i - z'_i) + z'_i)        e_i = (w_i - (q_i - z_i) s_i) / U_ii
                         w_j <- w_j - U_ij e_i   for all j > i                    z' = round(z)

With ``float4`` q_i is twice the nearest e2m1 number, whatever bits say (ops/float4.py).

Shapes:  w, s, z [B, N] fp32, w a channel a row   U [B, B] fp32   q int8 [B, N]   e fp32 [B, N]   B <= 128
Why:     Channels depend on each other, outputs do not: a program keeps [B, BLOCK_N] of w and walks down the channels.  As
         tensor calls the same loop is ten launches a channel, a million channels in a model of 8B weights.
Arch:    any that Triton supports; fp32 only.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import why_not_here
from mmqc.kernels.shared.quantize_codes import divide_tile

MAX_BLOCK = 128
BLOCK_N = 32


@triton.jit
def round_tile(x):
    """Half to even, for |x| < 2^22; beyond that any integer of the same sign, which the clamp takes."""
    x = tl.minimum(tl.maximum(x, -4194304.0), 4194304.0)
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_float4_tile(x):
    """Twice the nearest e2m1 number: steps of 1 to 4, of 2 to 8, of 4 to 12."""
    size = tl.abs(x)
    step = tl.where(size >= 8.0, 4.0, tl.where(size >= 4.0, 2.0, 1.0))
    inverse = tl.where(size >= 8.0, 0.25, tl.where(size >= 4.0, 0.5, 1.0))  # exact, as a division here need not be
    return tl.minimum(tl.maximum(round_tile(x * inverse) * step, -12.0), 12.0)


@triton.jit
def gptq_block_kernel(
    w_ptr, u_ptr, s_ptr, z_ptr, q_ptr, e_ptr, B, N,
    stride_w, stride_u, stride_s, stride_sn, stride_z, stride_zn,
    HAS_ZERO: tl.constexpr, FLOAT4: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N outputs."""
    rows, at = tl.arange(0, BLOCK_B), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide, inside = at.to(tl.int64), at < N
    w = tl.load(
        w_ptr + rows[:, None].to(tl.int64) * stride_w + wide[None, :], (rows[:, None] < B) & inside[None, :], other=0.0
    )  # [BB, BN]
    for i in range(B):
        x = tl.sum(tl.where(rows[:, None] == i, w, 0.0), 0)  # [BN]
        s = tl.load(s_ptr + i * stride_s + wide * stride_sn, inside, other=1.0)
        u = tl.load(u_ptr + i * stride_u + rows, (rows >= i) & (rows < B), other=0.0)  # [BB]
        unit = divide_tile(x, s)
        if HAS_ZERO:
            z = tl.load(z_ptr + i * stride_z + wide * stride_zn, inside, other=0.0)
            whole = round_tile(z)
            q = tl.minimum(tl.maximum(round_tile(unit + (z - whole)) + whole, LOW), HIGH)
            value = (q - z) * s
        else:
            q = round_float4_tile(unit) if FLOAT4 else round_tile(unit)
            if not FLOAT4:
                q = tl.minimum(tl.maximum(q, LOW), HIGH)
            value = q * s
        e = tl.div_rn(x - value, tl.zeros_like(x) + tl.load(u_ptr + i * stride_u + i))
        tl.store(q_ptr + i * N + wide, q.to(tl.int8), inside)
        tl.store(e_ptr + i * N + wide, e, inside)
        w = w - u[:, None] * e[None, :]


def supports(w: Tensor, u: Tensor, scale: Tensor, zero: Tensor | None) -> str | None:
    """None, or why these operands cannot be taken here."""
    if w.dtype != torch.float32:
        return f"channels are float32, not {w.dtype}"
    if w.shape[0] > MAX_BLOCK:
        return f"{w.shape[0]} channels: at most {MAX_BLOCK}"
    if w.stride(1) != 1 or u.stride(1) != 1:
        return "w and U are contiguous along their rows"
    return why_not_here(w, u, scale, zero)


def gptq_block(
    w: Tensor, u: Tensor, scale: Tensor, zero: Tensor | None, bits: int, out: tuple[Tensor, Tensor] | None = None,
    float4: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes and errors; see the top of the file.  ``scale`` and ``zero`` may have strides of zero."""
    reason = supports(w, u, scale, zero)
    if reason is not None:
        raise ValueError(f"gptq_block: {reason}")
    size, n = w.shape
    codes, errors = out if out is not None else (torch.empty_like(w, dtype=torch.int8), torch.empty_like(w))
    if not (codes.is_contiguous() and errors.is_contiguous()):
        raise ValueError("gptq_block: out is contiguous")
    if not w.numel():
        return codes, errors
    z = scale if zero is None else zero
    gptq_block_kernel[(triton.cdiv(n, BLOCK_N),)](
        w, u, scale, z, codes, errors, size, n, w.stride(0), u.stride(0), *scale.stride(), *z.stride(),
        HAS_ZERO=zero is not None, FLOAT4=float4, LOW=-(2.0 ** (bits - 1)), HIGH=2.0 ** (bits - 1) - 1,
        BLOCK_B=max(16, triton.next_power_of_2(size)), BLOCK_N=BLOCK_N, enable_fp_fusion=True,
        num_warps=1,  # no step waits for others
    )
    return codes, errors
