"""Memory full of what no kernel writes: NaN, or 77."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def poisoned(x: Tensor) -> Callable[[int, torch.dtype], Tensor]:
    """For results of every row of x, as kernels/shared/plan.py's ``rows_like``."""

    def new(width: int, dtype: torch.dtype) -> Tensor:
        value = float("nan") if dtype.is_floating_point else 77
        return torch.full((len(x), width), value, device=x.device).to(dtype)

    return new
