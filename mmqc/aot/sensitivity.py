"""How far a model's logits move where its inputs move by a rounding error: what another order of the same sums may do to it.

    moved(model, batch)   =  max over draws of |f(x (1 + ε)) - f(x)| / |f(x)|        ε normal, some units of the last place
    moved_row             the same of the row of logits that moves the most: a token's

A model that rounds activations moves by steps: in 4 bits a code on the other side of a tie may be tens of percent of the logits
(docs/explanation/export.md), and in 8 bits of a token's.  A package whose sums are in another order cannot be nearer to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmqc.aot.exportable import relative_error

DRAWS = 4
FLOAT32 = 2e-6  # of ε: a long sum's error; of types with less it is one unit of the last place


def moved(logits: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> float:
    """The largest relative movement over ``DRAWS`` draws, which are the same every time; 0 where no input but a mask is a float.

    Args:
        logits: takes the batch by keyword.
        batch: its tensors are not changed.
    """
    return max((relative_error(near, expected) for near, expected in _moves(logits, batch)), default=0.0)


def moved_row(logits: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> float:
    """As ``moved``, of single rows of what ``logits`` returns, [..., V]."""
    pairs = ((near.flatten(0, -2), expected.flatten(0, -2)) for near, expected in _moves(logits, batch))
    return max((relative_error(*rows) for pair in pairs for rows in zip(*pair, strict=True)), default=0.0)


@torch.no_grad()
def _moves(logits: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    floats = {name: x for name, x in batch.items() if x.is_floating_point() and "mask" not in name}
    if not floats:
        return []
    generator, expected = torch.Generator().manual_seed(0), logits(**batch)
    pairs = []
    for _ in range(DRAWS):
        near: dict[str, Any] = {name: x * (1 + _noise(x, generator)) for name, x in floats.items()}
        pairs.append((logits(**{**batch, **near}), expected))
    return pairs


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    size = max(FLOAT32, torch.finfo(x.dtype).eps)
    return (size * torch.randn(x.shape, generator=generator)).to(x)
