"""What a layer's rounding of cached keys knows of the queries to come: their second moment, by KV head.

    M_h = mean of q qᵀ over the query heads of KV head h and over tokens that are text behind an image

A child of the attention module, so that it is saved and loaded with the model (ops/kv_round_keys.py says what it is for).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

CHILD = "kv_query_moment"


class QueryMoment(nn.Module):
    """``moment`` [H, D, D]."""

    moment: Tensor

    def __init__(self, heads: int, width: int, device: Any = None) -> None:
        super().__init__()
        self.register_buffer("moment", torch.zeros(heads, width, width, device=device))

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values; float32 whatever the model is."""
        return {"heads": self.moment.shape[0], "width": self.moment.shape[1]}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> QueryMoment:
        """On the meta device."""
        return cls(spec["heads"], spec["width"], device="meta")


def moment_of(module: nn.Module) -> Tensor | None:
    """What is known of this attention module's queries."""
    child = module._modules.get(CHILD)
    return child.moment if isinstance(child, QueryMoment) else None


def forget(modules: Iterable[nn.Module]) -> None:
    """Take the moments away."""
    for module in modules:
        module._modules.pop(CHILD, None)


def restorer(model: nn.Module) -> Callable[[], None]:
    """What gives every module of ``model`` the moment that it has now, and takes away what came later."""
    before = {module: module._modules[CHILD] for module in model.modules() if CHILD in module._modules}

    def restore() -> None:
        forget(list(model.modules()))
        for module, child in before.items():
            module._modules[CHILD] = child

    return restore
