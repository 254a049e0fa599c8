"""causal_mask as one comparison, which fuses into the kernel that reads the mask.

    allow[b, 0, i, j] = keys[b, j] <= queries[b, i]

Shapes:  those of ops/causal_mask.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmqc.lowering.inductor import Pointwise, TensorBox, ops, register_lowering


@register_lowering(torch.ops.mmqc.causal_mask.default, type_promotion_kind=None)
def lower_causal_mask(queries: TensorBox, keys: TensorBox | None, k: TensorBox) -> TensorBox:
    """Pointwise IR, bool."""
    batch, length = queries.get_size()
    last = k.get_size()[-2] if keys is None else keys.get_size()[1]
    load_query, load_key = queries.make_loader(), None if keys is None else keys.make_loader()

    def inner(at: Sequence[Any]) -> Any:
        key = ops.index_expr(at[3], torch.int64) if load_key is None else load_key([at[0], at[3]])
        return ops.le(key, load_query([at[0], at[2]]))

    ranges = [batch, 1, length, last]
    return Pointwise.create(device=queries.get_device(), dtype=torch.bool, inner_fn=inner, ranges=ranges)
