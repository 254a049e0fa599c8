"""What a product's epilogue does behind its affine part (ops/scaled_matmul_epilogue.py), as a launcher's value and as tile code.

    h = f(z),  or  f(z) ∘ u            y = h,  or  clamp(round(h / s_next(m)))

z, u and h are rounded to the dtype that they have in the unfused model; s_next: row_scale.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mmqc.kernels.shared.activation_tiles import CODES
from mmqc.kernels.shared.quantize_codes import quantize_tile, round_tile
from mmqc.kernels.shared.row_scale import ONE, RowScale, row_scale_tile

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Epilogue(NamedTuple):
    """What follows z.

    Attributes:
        activation: its name.
        dtype: of z and h.
        next: the scales of the codes, if it ends in codes.
        bits: of the codes.
        low: x_S [M, r] and W_S [N, r], contiguous, of a term that is added to z; of one linear only.
    """

    activation: str = "none"
    dtype: torch.dtype = torch.float32
    next: RowScale | None = None
    bits: int = 8
    low: tuple[Any, Any] | None = None

    def args(self, absent: Any) -> dict[str, Any]:
        """The kernels' operands; ``absent`` stands for those that are not read."""
        scale, rows = (absent, absent) if self.next is None else (self.next.scale, self.next.rows)
        return {"next_scale_ptr": scale, "next_row_ptr": rows}

    def of_one(self, absent: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Operands and constants that a kernel of one linear has besides: the term of low rank."""
        low_x, low_w = (absent, absent) if self.low is None else self.low
        return {"low_x_ptr": low_x, "low_w_ptr": low_w}, {"RANK": 0 if self.low is None else low_w.shape[1]}

    def constants(self) -> dict[str, Any]:
        """The kernels' constants."""
        high = 2.0 ** (self.bits - 1)
        kind = ONE.value if self.next is None else self.next.kind
        return {"ACTIVATION": CODES[self.activation], "NEXT": self.next is not None, "NEXT_KIND": kind,
                "ROUND": TYPES[self.dtype], "LOW": -high, "HIGH": high - 1}


@triton.jit
def add_low_rank_tile(z, x_ptr, w_ptr, rows, row_mask, cols, col_mask, RANK: tl.constexpr):
    """Z [BM, BN] + x_S W_Sᵀ, one outer product after the other: a product of its own would need its sums beside those of z."""
    for r in tl.static_range(RANK):  # pyright: ignore[reportGeneralTypeIssues]  # compiled, not run
        a = tl.load(x_ptr + rows.to(tl.int64) * RANK + r, mask=row_mask, other=0.0).to(tl.float32)
        b = tl.load(w_ptr + cols * RANK + r, mask=col_mask, other=0.0).to(tl.float32)
        z += a[:, None] * b[None, :]
    return z


@triton.jit
def next_codes_tile(
    h, scale_ptr, row_ptr, rows, row_mask, KIND: tl.constexpr, ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    PTX: tl.constexpr,
):
    """H [BM, BN] as the next linear's int8 codes."""
    s = row_scale_tile(scale_ptr, row_ptr, rows, row_mask, KIND)  # [BM]
    return quantize_tile(round_tile(h, ROUND, PTX), s[:, None], LOW, HIGH, False)
