"""materialize: a buffer of its own, which no kernel that reads it computes anew."""

from __future__ import annotations

import torch

from mmqc.lowering.inductor import TensorBox, contiguous, lowerings, register_lowering


@register_lowering(torch.ops.mmqc.materialize.default, type_promotion_kind=None)
def lower_materialize(x: TensorBox) -> TensorBox:
    """Written by one kernel, with what it is computed from in front."""
    y = lowerings[torch.ops.aten.clone.default](x, memory_format=torch.contiguous_format)
    y.realize()
    return contiguous(y)
