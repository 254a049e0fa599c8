"""NaN and infinity in what a static scale quantizes: no integer stands for them, so by default the result is finite.

    y[m] = NaN  where x[m] holds NaN or infinity          inside ``with propagate_nonfinite():``

Why:   a code of 8 bits has no NaN, an integer product none to give, and to look at every activation costs a pass over it.  Scales
       by token carry NaN by themselves.
Cost:  none outside the block.  Inside it a row's flag stands between a product and what follows, which then is not fused into it;
       compiled code is compiled anew, for Dynamo guards the switch; what the backend quantized by itself (``options={"config":
       ...}``) runs uncompiled on the other side of the switch than the one that it was compiled on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

propagating = False


@contextmanager
def propagate_nonfinite() -> Iterator[None]:
    """Until the end of the block, rows with NaN or infinity come out of static linears as NaN, in all threads."""
    global propagating
    before, propagating = propagating, True
    try:
        yield
    finally:
        propagating = before


def poisoned(y: Tensor, x: Tensor) -> Tensor:
    """Y [..., N], NaN in the rows where x [..., K] is not finite."""
    return torch.where(torch.isfinite(x).all(-1, keepdim=True), y, float("nan"))
