"""What a product's epilogue does behind its affine part (ops/scaled_matmul_epilogue.py), as a launcher's value and as tile code.

    h = f(z),  or  f(z) ∘ u            y = h,  or  clamp(round(h / s_next(m)))

z, u and h are rounded to the dtype that they have in the unfused model; s_next: row_scale.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mmqc.kernels.activation_tiles import CODES
from mmqc.kernels.quantize_codes import quantize_tile
from mmqc.kernels.row_scale import ONE, RowScale, row_scale_tile

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Epilogue(NamedTuple):
    """What follows z: the activation's name, the dtype of z and h, and the scales and bits of the codes, if it ends in codes."""

    activation: str = "none"
    dtype: torch.dtype = torch.float32
    next: RowScale | None = None
    bits: int = 8

    def args(self, absent: Any) -> dict[str, Any]:
        """The kernels' operands; ``absent`` stands for those that are not read."""
        scale, rows = (absent, absent) if self.next is None else (self.next.scale, self.next.rows)
        return {"next_scale_ptr": scale, "next_row_ptr": rows}

    def constants(self) -> dict[str, Any]:
        """The kernels' constants."""
        high = 2.0 ** (self.bits - 1)
        kind = ONE.value if self.next is None else self.next.kind
        return {"ACTIVATION": CODES[self.activation], "NEXT": self.next is not None, "NEXT_KIND": kind,
                "ROUND": TYPES[self.dtype], "LOW": -high, "HIGH": high - 1}  # fmt: skip


@triton.jit
def round_tile(x, DTYPE: tl.constexpr):
    """A float32 tile as numbers of DTYPE, in float32."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def next_codes_tile(
    h, scale_ptr, row_ptr, rows, row_mask, KIND: tl.constexpr, ROUND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):  # fmt: skip
    """H [BM, BN] as the next linear's int8 codes."""
    s = row_scale_tile(scale_ptr, row_ptr, rows, row_mask, KIND)  # [BM]
    return quantize_tile(round_tile(h, ROUND), s[:, None], LOW, HIGH, False)
