"""Static symmetric quantization, with one scale or with one per modality (MQuant's MSQ, section 4.1).

    q = clamp(round(x / s_row), -2^(b-1), 2^(b-1) - 1)         s_row = s[0], or s[1] where ``visual``
    q = float8(clamp(x / s_row, -448, 448))                    with ``code`` float8_e4m3fn

Shapes:  x [..., K]   scale [1] or [2] = (text, visual)   visual bool, broadcastable to [...]   q int8 or float8 [..., K]
Error:   round half to even; |e| <= s / 2 inside the range (float8: |e| <= |x| / 16, or s 2^-10), saturation outside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define
from mmqc.ops.pack import FLOAT8

LARGEST = 448.0  # of its numbers


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


def code_dtype(bits: int, code: torch.dtype | None) -> torch.dtype:
    """Of the codes; raises unless there are such."""
    if not 2 <= bits <= 8:
        raise ValueError(f"bits = {bits}: activations have 2 to 8 bits")
    if code not in (None, torch.int8, FLOAT8) or (code == FLOAT8 and bits != 8):
        raise ValueError(f"codes are int8, or {FLOAT8} of 8 bits, not {code} of {bits}")
    return code or torch.int8


def reference(x: Tensor, scale: Tensor, visual: Tensor | None, bits: int, code: torch.dtype | None = None) -> Tensor:
    """Divide in float32 at least, round, clamp, store as int8 or float8."""
    return codes(x, row_scale(scale, visual), bits, code_dtype(bits, code))


def codes(x: Tensor, scale: Tensor, bits: int, code: torch.dtype = torch.int8) -> Tensor:
    """The formula, for a scale that broadcasts to x."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    q = x.to(dtype) / scale.to(dtype)
    if code == FLOAT8:
        return q.float().clamp(-LARGEST, LARGEST).to(FLOAT8)
    top = 2 ** (bits - 1)
    return torch.round(q).clamp(-top, top - 1).to(torch.int8)


def fake(x: Tensor, scale: Tensor, visual: Tensor | None, bits: int, code: torch.dtype | None = None) -> Tensor:
    """int8 or float8, shaped like x and contiguous."""
    check_scale(scale, visual)
    return x.new_empty(x.shape, dtype=code_dtype(bits, code))


def contiguous_reference(x: Tensor, scale: Tensor, visual: Tensor | None, bits: int, code: torch.dtype | None = None) -> Tensor:
    """The reference, row-major whatever the strides of x: a matmul reads the result."""
    return reference(x, scale, visual, bits, code).contiguous()


define("quantize(Tensor x, Tensor scale, Tensor? visual, int bits, ScalarType? code=None) -> Tensor", contiguous_reference, fake)
