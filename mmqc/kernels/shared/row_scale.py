"""The activation scale of every row, in the four forms that a quantized activation has.

    ONE      s[0]                                static, one scale
    VISUAL   s[1] where visual[m] else s[0]      static, one scale per modality (MQuant, arXiv:2502.00425, 4.1)
    SPLIT    s[1] where m < split[0] else s[0]   the same for rows sorted by modality, visual rows first
    ROW      s[m]                                dynamic, per token

Shapes:  s float32 [1], [2] = (text, visual) or [M]   visual bool [M]   split int32 [1]
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
SPLIT = tl.constexpr(2)
ROW = tl.constexpr(3)


class RowScale(NamedTuple):
    """The kind and the two tensors that the kernel reads; ``rows`` is the mask or the split, else the scale again."""

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


def row_scale(scale: Tensor, m: int, visual: Tensor | None = None, split: Tensor | None = None) -> RowScale:
    """Check a scale against ``m`` rows and say which of the four forms it is."""
    if scale.dtype != torch.float32 or scale.dim() != 1 or not scale.is_contiguous():
        raise ValueError(f"a scale is a contiguous float32 vector, not {scale.dtype} {list(scale.shape)}")
    if visual is not None and split is not None:
        raise ValueError("give visual or split, not both")
    if visual is None and split is None:
        if scale.shape[0] == 1:
            return RowScale(ONE.value, scale, scale)
        if scale.shape[0] != m:
            raise ValueError(f"a scale without visual or split has 1 or M = {m} entries, not {scale.shape[0]}")
        return RowScale(ROW.value, scale, scale)
    if scale.shape[0] != 2:
        raise ValueError(f"a scale per modality has 2 entries = (text, visual), not {scale.shape[0]}")
    if split is not None:
        if split.dtype != torch.int32 or split.numel() != 1:
            raise ValueError(f"split is one int32 on the device, not {split.dtype} {list(split.shape)}")
        return RowScale(SPLIT.value, scale, split)
    assert visual is not None
    if visual.dtype != torch.bool or visual.numel() != m:
        raise ValueError(f"visual is bool with M = {m} entries, not {visual.dtype} {list(visual.shape)}")
    return RowScale(VISUAL.value, scale, visual.reshape(-1).contiguous().view(torch.uint8))


@triton.jit
def row_scale_tile(scale_ptr, rows_ptr, rows, mask, KIND: tl.constexpr):
    """The float32 scale of every row in ``rows``, shaped like it."""
    if KIND == ROW:
        s = tl.load(scale_ptr + rows, mask=mask, other=1.0)
    elif KIND == VISUAL:
        visual = tl.load(rows_ptr + rows, mask=mask, other=0)
        s = tl.where(visual != 0, tl.load(scale_ptr + 1), tl.load(scale_ptr))
    elif KIND == SPLIT:
        s = tl.where(rows < tl.load(rows_ptr), tl.load(scale_ptr + 1), tl.load(scale_ptr))
    else:
        s = (rows * 0).to(tl.float32) + tl.load(scale_ptr)
    return s
