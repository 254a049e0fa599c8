"""Write a stored weight out once, for matmuls with so many rows that this costs nothing next to them.

    out[n, k] = w_q[n, k]                          int8, from 4-bit codes (ops/pack.py)
    out[n, k] = (w_q[n, k] - z[n, k // g]) s[n, k // g]     fp16, bf16, fp32, from 4- or 8-bit codes

Shapes:  w_q uint8 [N, ceil(K/2)] or int8 [N, K]   s, z [N] or [N, ceil(K/g)]   out [N, K]
"""

# A launch gives plain values to constexpr parameters, and options that are no parameters.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.device_facts import ceil_div


@triton.jit
def unpack_weight_kernel(
    w_ptr, out_ptr, scale_ptr, zero_ptr, N, K, STORED, GROUPS,
    PACKED: tl.constexpr, SCALED: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row's stretch of BLOCK_K stored bytes."""
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    w = tl.load(w_ptr + n * STORED + at, mask=at < STORED, other=0).to(tl.int32)
    for half in tl.static_range(2 if PACKED else 1):  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
        codes, k = w, at
        if PACKED:
            codes = ((w >> (4 * half)) & 15) - 8
            k = at + half * STORED
        mask = (at < STORED) & (k < K)
        if SCALED:
            group = n * GROUPS + (k // GROUP if GROUP else k * 0)
            value = codes.to(tl.float32)
            if HAS_ZERO:
                value -= tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
            value *= tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_ptr + n * K + k, value.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(out_ptr + n * K + k, codes.to(tl.int8), mask=mask)


def unpack_weight(
    w_q: Tensor, k: int, *, bits: int, dtype: torch.dtype = torch.int8, scale: Tensor | None = None,
    zero: Tensor | None = None, group_size: int = 0,
) -> Tensor:  # fmt: skip
    """The weight [N, K] in ``dtype``: its codes, or with ``scale`` the numbers that they stand for."""
    n, stored = w_q.shape
    out = torch.empty(n, k, dtype=dtype, device=w_q.device)
    block = min(4096, max(16, triton.next_power_of_2(stored)))
    unpack_weight_kernel[(n, ceil_div(stored, block))](
        w_q, out, out if scale is None else scale, out if zero is None else zero,
        n, k, stored, 1 if scale is None or scale.dim() == 1 else scale.shape[1],
        PACKED=bits == 4, SCALED=scale is not None, HAS_ZERO=zero is not None, GROUP=group_size, BLOCK_K=block,
        num_warps=4,
    )  # fmt: skip
    return out
