"""The causal mask of tokens that are not in the order of their positions.

    allow[b, 0, i, j] = position of key j <= position of query i

Shapes:  queries int64 [B, Lq]: position of every query row   keys int64 [B, Lk], or None: keys are in sequence order
         k [..., Lk, D]: gives Lk   allow bool [B, 1, Lq, Lk]
Why:     equation 9 of MQuant (arXiv:2502.00425) for any layout of images and text; what ``is_causal`` says in sequence order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define


def reference(queries: Tensor, keys: Tensor | None, k: Tensor) -> Tensor:
    """Compare positions."""
    if keys is None:
        keys = torch.arange(k.shape[-2], device=queries.device).unsqueeze(0)
    return keys[:, None, None, :] <= queries[:, None, :, None]


def fake(queries: Tensor, keys: Tensor | None, k: Tensor) -> Tensor:
    """[B, 1, Lq, Lk]."""
    last = k.shape[-2] if keys is None else keys.shape[1]
    return queries.new_empty((queries.shape[0], 1, queries.shape[1], last), dtype=torch.bool)


define("causal_mask(Tensor queries, Tensor? keys, Tensor k) -> Tensor", reference, fake)
