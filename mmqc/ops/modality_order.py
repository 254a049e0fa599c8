"""The permutation that puts all visual tokens in front of all text, each in the order in which they came.

    order[b] = stable argsort of not visual[b],     inverse[b, order[b, i]] = i          (flat: one permutation of all rows)

Shapes:  visual bool [B, L]   order, inverse int64 [B, L];   flat: order [1, B L], inverse [B, L], numbering the rows b L + l
Why:     MQuant's AIFS (arXiv:2502.00425, section 4.1): tokens of one modality side by side have one scale.
Exact:   yes. A stable partition needs two running counts and no sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define


def check(visual: Tensor) -> None:
    """Raise unless ``visual`` is a mask over batch and length."""
    if visual.dim() != 2 or visual.dtype != torch.bool:
        raise ValueError(f"visual is bool [batch, length], not {visual.dtype} {list(visual.shape)}")


def reference(visual: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
    """Where each row goes is the number of rows of its kind before it, after all visual rows for text."""
    check(visual)
    rows = visual.reshape(1, -1) if flat else visual
    seen = rows.to(torch.int64).cumsum(1)
    number = torch.arange(rows.shape[1], device=rows.device)
    inverse = torch.where(rows, seen - 1, seen[:, -1:] + number - seen)
    order = torch.zeros_like(inverse).scatter(1, inverse, number.expand(inverse.shape))
    return order, inverse.reshape(visual.shape).clone()


def fake(visual: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
    """Two int64 index tensors."""
    check(visual)
    size = (1, visual.shape[0] * visual.shape[1]) if flat else visual.shape
    return visual.new_empty(size, dtype=torch.int64), visual.new_empty(visual.shape, dtype=torch.int64)


define("modality_order(Tensor visual, bool flat) -> (Tensor, Tensor)", reference, fake)
