"""The activation scale of every row, in the three forms that a quantized activation has.

    ONE      s[0]                                static, one scale
    VISUAL   s[1] where visual[m] else s[0]      static, one scale per modality (MQuant, arXiv:2502.00425, 4.1)
    ROW      s[m]                                dynamic, per token

Shapes:  s float32 [1], [2] = (text, visual) or [M]   visual bool [M]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmqc.kernels.shared.plan import New

ONE = tl.constexpr(0)
VISUAL = tl.constexpr(1)
ROW = tl.constexpr(3)


class RowScale(NamedTuple):
    """The kind and the two tensors that the kernel reads; ``rows`` is the mask, else the scale again."""

    kind: int
    scale: Tensor
    rows: Tensor


class Rows(NamedTuple):
    """A quantized matrix: codes int8 [M, D], part after part, scales and offsets float32 [M, P]."""

    q: Tensor
    scale: Tensor
    offset: Tensor

    @classmethod
    def new(cls, new: New, width: int, parts: int) -> Rows:
        """Memory for one."""
        scale, offset = (new(parts, torch.float32) for _ in "so")
        return cls(new(width, torch.int8), scale, offset)


def row_scale(scale: Tensor, m: int, visual: Tensor | None = None) -> RowScale:
    """Check a scale against ``m`` rows and say which of the three forms it is."""
    if scale.dtype != torch.float32 or scale.dim() != 1 or not scale.is_contiguous():
        raise ValueError(f"a scale is a contiguous float32 vector, not {scale.dtype} {list(scale.shape)}")
    if visual is None:
        if scale.shape[0] == 1:
            return RowScale(ONE.value, scale, scale)
        if scale.shape[0] != m:
            raise ValueError(f"a scale without visual has 1 or M = {m} entries, not {scale.shape[0]}")
        return RowScale(ROW.value, scale, scale)
    if scale.shape[0] != 2:
        raise ValueError(f"a scale per modality has 2 entries = (text, visual), not {scale.shape[0]}")
    if visual.dtype != torch.bool or visual.numel() != m:
        raise ValueError(f"visual is bool with M = {m} entries, not {visual.dtype} {list(visual.shape)}")
    flat = visual.reshape(-1).contiguous()
    # Inductor (2.11) cannot lower a view of bool as bytes; a call that is traced computes them.
    return RowScale(VISUAL.value, scale, flat.view(torch.uint8) if type(flat) is torch.Tensor else flat.to(torch.uint8))


@triton.jit
def row_scale_tile(scale_ptr, rows_ptr, rows, mask, KIND: tl.constexpr):
    """The float32 scale of every row in ``rows``, shaped like it."""
    if KIND == ROW:
        s = tl.load(scale_ptr + rows, mask=mask, other=1.0)
    elif KIND == VISUAL:
        visual = tl.load(rows_ptr + rows, mask=mask, other=0)
        s = tl.where(visual != 0, tl.load(scale_ptr + 1), tl.load(scale_ptr))
    else:
        s = (rows * 0).to(tl.float32) + tl.load(scale_ptr)
    return s
