"""gather_rows as one pointwise node with an indirect load, which fuses with what reads it.

    y[i, j, ...] = x[index[i, j] // L, index[i, j] % L, ...]

Shapes:  those of ops/gather_rows.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmqc.lowering.inductor import Pointwise, TensorBox, lowerings, ops, register_lowering

aten = torch.ops.aten


@register_lowering(torch.ops.mmqc.gather_rows.default, type_promotion_kind=None)
def lower_gather_rows(x: TensorBox, index: TensorBox) -> TensorBox:
    """Pointwise IR over the flattened rows."""
    size: list[Any] = list(x.get_size())
    rows = size[0] * size[1]
    load = lowerings[aten.view.default](x, [rows, *size[2:]]).make_loader()
    load_index = index.make_loader()

    def inner(at: Sequence[Any]) -> Any:
        return load([ops.indirect_indexing(load_index(at[:2]), rows), *at[2:]])

    return Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=inner, ranges=[*index.get_size(), *size[2:]])
