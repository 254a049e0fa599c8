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

from mmqc.kernels.hadamard import hadamard_quantize
from mmqc.kernels.hadamard.hadamard_plan import Matrices
from mmqc.kernels.hadamard.hadamard_slices import few
from mmqc.kernels.hadamard.hadamard_tiles import Written
from mmqc.kernels.rows import quantize_per_token
from mmqc.kernels.shared.plan import New, Plan, Refusal, rows_like
from mmqc.kernels.shared.row_scale import Rows


def plan(
    x: Tensor, up: Tensor | None, matrices: Matrices, bits: int, new: New | None = None, *, by_warpgroups: bool = True
) -> Plan[Rows] | Refusal:
    """Codes, scales and offsets of every row of x, or with ``up`` of silu(x) * up; ``by_warpgroups`` as in hadamard_quantize."""
    reason = hadamard_quantize.why_not(x, up, bits, torch.int8)
    found = Refusal(reason) if reason else matrices(x.shape[1], x.device, x.dtype)
    if isinstance(found, Refusal):
        return found
    n, new = x.shape[1], new or rows_like(x)
    if few(x, found.tiling):
        y = Written(new(n, x.dtype))
        first = hadamard_quantize.launches(x, up, y, found, new, by_warpgroups)
        second = quantize_per_token.plan(y.y, [n], [bits], new)
        return second if isinstance(second, Refusal) else Plan((*first, *second.launches), second.out)
    out = Rows.new(new, n, 1)
    written = Written(out.q, None, out.scale, out.offset, bits)
    return Plan(hadamard_quantize.launches(x, up, written, found, new, by_warpgroups), out)
