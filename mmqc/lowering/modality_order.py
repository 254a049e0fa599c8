"""modality_order as a running count and a stable sort of the mask (once a graph).

    inverse = where(visual, seen - 1, total + number - seen),   order = stable argsort of not visual

Shapes:  those of ops/modality_order.py
"""

from __future__ import annotations

from typing import Any

import torch

from mmqc.lowering.inductor import TensorBox, convert, lowerings, register_lowering

aten = torch.ops.aten


@register_lowering(torch.ops.mmqc.modality_order.default, type_promotion_kind=None)
def lower_modality_order(visual: TensorBox, flat: bool) -> tuple[TensorBox, TensorBox]:
    """Inductor's own cumsum and sort."""
    call = lambda op, *args, **kwargs: lowerings[op](*args, **kwargs)  # noqa: E731
    size: list[Any] = list(visual.get_size())
    rows = call(aten.view.default, visual, [1, size[0] * size[1]]) if flat else visual
    shape = list(rows.get_size())
    seen = call(aten.cumsum.default, convert(rows, torch.int64), 1)
    number = call(
        torch.ops.prims.iota.default, shape[1], start=0, step=1, dtype=torch.int64, device=visual.get_device(), requires_grad=False
    )
    number = call(aten.expand.default, number, shape)
    total = call(aten.slice.Tensor, seen, 1, shape[1] - 1, shape[1])
    text = call(aten.sub.Tensor, call(aten.add.Tensor, total, number), seen)
    inverse = call(aten.where.self, rows, call(aten.sub.Tensor, seen, 1), text)
    is_text = convert(call(aten.logical_not.default, rows), torch.uint8)
    _, order = call(aten.sort.stable, is_text, stable=True, dim=1, descending=False)
    return order, call(aten.clone.default, call(aten.view.default, inverse, size))
