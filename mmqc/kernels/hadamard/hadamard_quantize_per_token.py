"""A Hadamard transform of every row, what stands in front of it and per-token asymmetric quantization, in one pass.

    h = x,  or  silu(x) ∘ u     y = h (F1 ⊗ … ⊗ Fr)ᵀ     q = round((y - min y) / s) - 2^(b-1)     o = min y + 2^(b-1) s

Shapes:  x, u [M, n]   q int8 [M, n]   s, o float32 [M, 1]: all channels are of one part (ops/hadamard_quantize_per_token.py)
How:     hadamard_quantize.py's kernels, whose programs hold whole rows.  y is rounded to x's dtype as when it is written, so the
         codes are those of the two kernels one after the other, to the bit.
         Few wide rows are faster in slices (hadamard_slices.py), of which none sees a row's range: then it is two kernels.
Bytes:   3 n a token in 16 bits, 5 n gated; one by one, 7 n, with the gate in front of the transform 9 n.
Arch:    Ampere and newer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.kernels.hadamard import hadamard_quantize as transform
from mmqc.kernels.hadamard.hadamard_plan import HadamardPlan, best_tiling
from mmqc.kernels.hadamard.hadamard_slices import few
from mmqc.kernels.rows import quantize_per_token as per_token
from mmqc.kernels.shared.launch import Launch
from mmqc.kernels.shared.row_scale import Rows


def supports(x: Tensor, up: Tensor | None, bits: int) -> str | None:
    """None, or why these operands cannot be transformed and quantized here."""
    reason = transform.supports(x, up, torch.int8)
    return reason or (None if 2 <= bits <= 8 else f"bits = {bits}: 2 to 8")


def hadamard_quantize_per_token(
    x: Tensor, bits: int, *, up: Tensor | None = None, plan: HadamardPlan | None = None, out: Rows | None = None,
    num_warps: int | None = None, programs: int | None = None, num_stages: int | None = None,
) -> Rows:
    """Codes, scales and offsets of every row; with ``up``, of silu(x) * up.  The options are hadamard_quantize's."""
    reason = supports(x, up, bits)
    if reason is not None:
        raise ValueError(f"hadamard_quantize_per_token: {reason}")
    m, n = x.shape
    out = Rows.empty(x, 1) if out is None else out
    if m == 0:
        return out
    if programs is None and few(x, plan.tiling if plan else best_tiling(n)):  # type: ignore[arg-type]  # supports has seen it
        y = transform.hadamard_quantize(x, up=up, code=None, plan=plan).y
        return per_token.quantize_per_token(y, [n], [bits], out=out)
    transform.run(x, up, out.q, plan, None, out.scale, torch.int8, bits, num_warps, programs, num_stages, out.offset)
    return out


def launch(
    x: Tensor, up: Tensor | None, out: Rows, plan: HadamardPlan, bits: int, num_warps: int | None = None,
    programs: int | None = None, num_stages: int | None = None,
) -> Launch:
    """Fill ``out``, in one kernel."""
    return transform.launch(
        x, up, out.q, plan, None, out.scale, torch.int8, bits, num_warps, programs, num_stages, out.offset
    )
