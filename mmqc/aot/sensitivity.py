"""How far a model's logits move where its inputs move by a rounding error: what another order of the same sums may do to it.

    moved(model, batch)  =  max over draws of |f(x (1 + ε)) - f(x)| / |f(x)|        ε normal, some units of the last place

A model that rounds activations moves by steps: in 4 bits a code on the other side of a tie may be tens of percent of the logits
(docs/explanation/export.md).  A package whose sums are in another order cannot be nearer to the model than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmqc.aot.exportable import relative_error

DRAWS = 4
FLOAT32 = 2e-6  # of ε: a long sum's error; of types with less it is one unit of the last place


@torch.no_grad()
def moved(logits: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> float:
    """The largest relative movement over ``DRAWS`` draws, which are the same every time; 0 where no input but a mask is a float.

    Args:
        logits: takes the batch by keyword.
        batch: its tensors are not changed.
    """
    floats = {name: x for name, x in batch.items() if x.is_floating_point() and "mask" not in name}
    if not floats:
        return 0.0
    generator, expected = torch.Generator().manual_seed(0), logits(**batch)
    errors = []
    for _ in range(DRAWS):
        near: dict[str, Any] = {name: x * (1 + _noise(x, generator)) for name, x in floats.items()}
        errors.append(relative_error(logits(**{**batch, **near}), expected))
    return max(errors)


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    size = max(FLOAT32, torch.finfo(x.dtype).eps)
    return (size * torch.randn(x.shape, generator=generator)).to(x)
