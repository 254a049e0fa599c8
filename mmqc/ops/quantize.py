"""Static symmetric quantization, with one scale or with one per modality (MQuant's MSQ, section 4.1).

    q = clamp(round(x / s_row), -2^(b-1), 2^(b-1) - 1)         s_row = s[0], or s[1] where ``visual``

Shapes:  x [..., K]   scale [1] or [2] = (text, visual)   visual bool, broadcastable to [...]   q int8 [..., K]
Error:   round half to even; |e| <= s / 2 inside the range, saturation outside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define


def check_scale(scale: Tensor, visual: Tensor | None) -> None:
    """Raise unless the scales and the mask fit each other."""
    if scale.dim() != 1 or scale.shape[0] not in (1, 2):
        raise ValueError(f"a static scale has shape [1], or [2] = (text, visual); got {list(scale.shape)}")
    if (scale.shape[0] == 2) != (visual is not None):
        need = "needs" if visual is None else "takes no"
        raise ValueError(f"a scale of shape {list(scale.shape)} {need} visual mask")


def row_scale(scale: Tensor, visual: Tensor | None) -> Tensor:
    """The scale of every row, [1] or [..., 1]."""
    check_scale(scale, visual)
    if visual is None:
        return scale
    return torch.where(visual, scale[1], scale[0]).unsqueeze(-1)


def reference(x: Tensor, scale: Tensor, visual: Tensor | None, bits: int) -> Tensor:
    """Divide in float32 at least, round, clamp, store as int8."""
    s = row_scale(scale, visual)
    dtype = torch.promote_types(x.dtype, torch.float32)
    q = torch.round(x.to(dtype) / s.to(dtype))
    top = 2 ** (bits - 1)
    return q.clamp(-top, top - 1).to(torch.int8)


def fake(x: Tensor, scale: Tensor, visual: Tensor | None, bits: int) -> Tensor:
    """int8, shaped like x and contiguous."""
    check_scale(scale, visual)
    if not 2 <= bits <= 8:
        raise ValueError(f"bits = {bits}: activations have 2 to 8 bits")
    return x.new_empty(x.shape, dtype=torch.int8)


def contiguous_reference(x: Tensor, scale: Tensor, visual: Tensor | None, bits: int) -> Tensor:
    """The reference, row-major whatever the strides of x: a matmul reads the result."""
    return reference(x, scale, visual, bits).contiguous()


define("quantize(Tensor x, Tensor scale, Tensor? visual, int bits) -> Tensor", contiguous_reference, fake)
