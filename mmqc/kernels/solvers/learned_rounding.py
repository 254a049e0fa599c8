"""A weight whose rounding is being learned, and the gradients of what is learned: one read of everything for each.

    learned_round               w = (q - z) s                     q = clamp(round(c + v))
    learned_round_gradients     dv = dw s  where c + v rounds into the grid, else 0        dt = s Σ (q - z) dw

Shapes:  c int8 [M, g]   v, dv, dw fp32 [M, g]   s, z, dt fp32 [M, 1]   w [M, g]; everything contiguous
Why:     bytes.  7 a weight for w in bfloat16 and 13 for the gradients, where the same as tensor calls moves 39 and 75.
Arch:    any that Triton supports.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.device_facts import why_not_here
from mmqc.kernels.solvers.gptq_block import round_tile

TILE = 2048


@triton.jit
def _centred(c_ptr, v_ptr, z, at, inside, HAS_ZERO: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """(q - z, c + v) of a tile."""
    wide = tl.load(c_ptr + at, inside, other=0).to(tl.float32) + tl.load(v_ptr + at, inside, other=0.0)
    q = tl.minimum(tl.maximum(round_tile(wide), LOW), HIGH)
    if HAS_ZERO:
        q = q - z
    return q, wide


@triton.jit
def learned_round_kernel(
    c_ptr, v_ptr, s_ptr, z_ptr, w_ptr, M, G,
    HAS_ZERO: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """ROWS groups."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [R, 1]
    s = tl.load(s_ptr + rows, rows < M, other=0.0)
    z = tl.load(z_ptr + rows, rows < M, other=0.0)
    for start in range(0, G, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        at, inside = rows * G + columns, (rows < M) & (columns < G)
        q, _ = _centred(c_ptr, v_ptr, z, at, inside, HAS_ZERO, LOW, HIGH)
        tl.store(w_ptr + at, (q * s).to(w_ptr.dtype.element_ty), inside)


@triton.jit
def learned_round_gradients_kernel(
    c_ptr, v_ptr, s_ptr, z_ptr, dw_ptr, dv_ptr, dt_ptr, M, G,
    HAS_ZERO: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """ROWS groups."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # [R, 1]
    s = tl.load(s_ptr + rows, rows < M, other=0.0)
    z = tl.load(z_ptr + rows, rows < M, other=0.0)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, G, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        at, inside = rows * G + columns, (rows < M) & (columns < G)
        q, wide = _centred(c_ptr, v_ptr, z, at, inside, HAS_ZERO, LOW, HIGH)
        dw = tl.load(dw_ptr + at, inside, other=0.0)
        total += q * dw
        tl.store(dv_ptr + at, tl.where((wide > LOW - 0.5) & (wide < HIGH + 0.5), dw * s, 0.0), inside)
    tl.store(dt_ptr + rows, tl.sum(total, 1)[:, None] * s, rows < M)


def supports(codes: Tensor, *others: Tensor | None) -> str | None:
    """None, or why these operands cannot be taken here."""
    if not all(t is None or t.is_contiguous() for t in (codes, *others)):
        return "everything is contiguous"
    return why_not_here(codes, *others)


def _launch(codes: Tensor, bits: int, zero: Tensor | None) -> tuple[tuple[int], dict[str, object]]:
    """(grid, constants)."""
    m, g = codes.shape
    block = min(TILE, max(16, 1 << (g - 1).bit_length()))
    rows = max(1, TILE // block)
    low, high = -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    return (-(-m // rows),), {"HAS_ZERO": zero is not None, "LOW": low, "HIGH": high, "ROWS": rows, "BLOCK": block}


def learned_round(
    codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, bits: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The weight; see the top of the file."""
    reason = supports(codes, offset, step, zero, out)
    if reason is not None:
        raise ValueError(f"learned_round: {reason}")
    weight = torch.empty_like(offset, dtype=dtype) if out is None else out
    if codes.numel():
        grid, constants = _launch(codes, bits, zero)
        learned_round_kernel[grid](
            codes, offset, step, step if zero is None else zero, weight, *codes.shape, enable_fp_fusion=True, **constants
        )
    return weight


def learned_round_gradients(
    codes: Tensor, offset: Tensor, step: Tensor, zero: Tensor | None, of_weight: Tensor, bits: int,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients by offsets and stretches; see the top of the file."""
    reason = supports(codes, offset, step, zero, of_weight, *(out or ()))
    if reason is not None:
        raise ValueError(f"learned_round_gradients: {reason}")
    of_offset, of_stretch = out if out is not None else (torch.empty_like(offset), torch.zeros_like(step))
    if codes.numel():
        grid, constants = _launch(codes, bits, zero)
        learned_round_gradients_kernel[grid](
            codes, offset, step, step if zero is None else zero, of_weight, of_offset, of_stretch, *codes.shape,
            enable_fp_fusion=True, **constants,
        )
    return of_offset, of_stretch
