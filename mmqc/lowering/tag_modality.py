"""tag_modality: y = x, so nothing is left of it in the generated code."""

from __future__ import annotations

import torch

from mmqc.lowering.inductor import TensorBox, lowerings, register_lowering
from mmqc.ops import tag_modality

_op = torch.ops.mmqc.tag_modality.default
__all__ = ["lower_tag_modality", "tag_modality"]


@register_lowering(_op, type_promotion_kind=None)
def lower_tag_modality(x: TensorBox, visual: TensorBox) -> TensorBox:
    """A copy that Inductor elides."""
    del visual
    return lowerings[torch.ops.aten.clone.default](x)
