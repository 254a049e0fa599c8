"""What a layer's rounding of cached keys knows of the queries to come: their second moment, by KV head.

    M_h = mean of q qᵀ over the query heads of KV head h and over tokens that are text behind an image

A child of the attention module, so that it is saved and loaded with the model (ops/kv_round_keys.py says what it is for).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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


class Observer:
    """Sums of q qᵀ by attention module; ``weight`` [B, L] says which tokens of the call in progress count."""

    def __init__(self) -> None:
        self.weight = torch.zeros(0, 0)
        self.sums: dict[nn.Module, Tensor] = {}
        self.counts: dict[nn.Module, float] = {}

    def __call__(self, module: nn.Module, query: Tensor, heads: int) -> None:
        """The queries [B, H_q, L, D] of a layer with so many KV heads."""
        batch, q_heads, length, width = query.shape
        q = query.detach().reshape(batch, heads, q_heads // heads, length, width).float()
        rows = (q * self.weight.to(q)[:, None, None, :, None]).transpose(0, 1).reshape(heads, -1, width)
        found = rows.mT @ q.transpose(0, 1).reshape(heads, -1, width)
        self.sums[module] = self.sums.get(module, 0) + found.double()
        self.counts[module] = self.counts.get(module, 0.0) + float(self.weight.sum()) * (q_heads // heads)

    def attach(self) -> None:
        """Give every module that was seen its moment."""
        for module, found in self.sums.items():
            child = QueryMoment(found.shape[0], found.shape[2], found.device)
            child.moment = (found / max(self.counts[module], 1.0)).float()
            child.train(module.training)
            module.add_module(CHILD, child)


def moment_of(module: nn.Module) -> Tensor | None:
    """What is known of this attention module's queries."""
    child = module._modules.get(CHILD)
    return child.moment if isinstance(child, QueryMoment) else None


def forget(modules: Iterable[nn.Module]) -> None:
    """Take the moments away."""
    for module in modules:
        module._modules.pop(CHILD, None)


@contextmanager
def kept_on_failure(model: nn.Module) -> Iterator[None]:
    """The moments that were there are there again if anything fails."""
    before: Mapping[nn.Module, Any] = {m: m._modules[CHILD] for m in model.modules() if CHILD in m._modules}
    try:
        yield
    except BaseException:
        forget(list(model.modules()))
        for module, child in before.items():
            module._modules[CHILD] = child
        raise
