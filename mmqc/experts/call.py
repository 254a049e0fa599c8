"""How a module of experts is called, and the rows that each expert gets: what every form of it comes down to.

    routed    f(x, index, weights)   y[t] = sum_j weights[t, j] expert_{index[t, j]}(x[t])
    sorted    f(x, counts)           rows by expert already (counts may be a list):  y[s] = expert_e(x[s])
    batched   f(x)                   as many rows for every expert:  y[e T + t] = expert_e(x[e T + t])

Shapes:  x [T, K] ([S, K] sorted, [E T, K] batched)   index int [T, k]   weights [T, k]   counts int [E]
         rows [S, K], S = T k if routed, sorted by expert; expert e has rows[offsets[e] : offsets[e + 1]]
An index beyond the experts (an absent one, of another device) sorts last and gets 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmqc.nn.modality import ModalityContext

ROUTED, SORTED, BATCHED = "routed", "sorted", "batched"


@dataclass(frozen=True)
class Rows:
    """Rows sorted by expert.

    Attributes:
        x: [S, K].
        offsets: int32 [E + 1].
        finish: [S, N] -> what the module returns.
        tokens: for every row the token that it came from, int64 [S]; None if it is not known.
    """

    x: Tensor
    offsets: Tensor
    finish: Callable[[Tensor], Tensor]
    tokens: Tensor | None

    def experts(self) -> Tensor:
        """The expert of every row, int64 [S]; the last one for rows that belong to none."""
        rows = torch.arange(self.x.shape[0], device=self.x.device, dtype=self.offsets.dtype)
        found = torch.searchsorted(self.offsets, rows, right=True) - 1  # of all: Inductor of torch 2.11 fails at a part of a tensor
        return found.clamp(max=self.offsets.shape[0] - 2)


@dataclass(frozen=True)
class ExpertCall:
    """The signature of a module of experts.

    Attributes:
        form: routed, sorted or batched.
        names: of all its arguments, in order.
        roles: the arguments that are used: x, then index and weights, or counts.
        experts: E.
        first: of the experts that this rank has, E of them; rows of others belong to none.  None: it has all.
    """

    form: str
    names: tuple[str, ...]
    roles: tuple[str, ...]
    experts: int
    first: int | None = None

    def rows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rows:
        """The rows of a call with these arguments."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        x, *rest = (given[name] for name in self.roles)
        flat = x.reshape(-1, x.shape[-1])
        if self.form == ROUTED:
            return self._routed(x, flat, *rest)
        shape = x.shape[:-1]
        if self.form == SORTED:
            ends = torch.as_tensor(rest[0], device=x.device).cumsum(0)
            tokens = None
        else:
            each = flat.shape[0] // self.experts
            ends = torch.arange(1, self.experts + 1, device=x.device) * each
            tokens = torch.arange(each, device=x.device).repeat(self.experts)
        offsets = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        return Rows(flat, offsets, lambda y: y.reshape(*shape, y.shape[-1]), tokens)

    def _routed(self, x: Tensor, flat: Tensor, index: Tensor, weights: Tensor) -> Rows:
        chosen = index.shape[-1]
        ids = index.reshape(-1)
        if self.first is not None:
            ids = ids - self.first
            ids = torch.where((ids < 0) | (ids >= self.experts), self.experts, ids)
        ids, order = torch.sort(ids, stable=True)
        bounds = torch.arange(self.experts + 1, device=ids.device, dtype=ids.dtype)
        offsets = torch.searchsorted(ids, bounds, out_int32=True)
        tokens = order // chosen
        shape, dtype = x.shape[:-1], x.dtype

        def finish(y: Tensor) -> Tensor:
            back = torch.argsort(order)
            each = y[back].view(-1, chosen, y.shape[-1]) * weights.reshape(-1, chosen, 1)
            return each.sum(1).to(dtype).reshape(*shape, y.shape[-1])

        return Rows(flat[tokens], offsets, finish, tokens)

    def visual(self, rows: Rows, x: Tensor, context: ModalityContext | None) -> Tensor | None:
        """Which rows are visual, bool [S]; None where all are text.  ``x`` is the call's."""
        if context is None or rows.tokens is None:
            return None
        flat = x.reshape(-1, x.shape[-1])
        mask = context.rows(flat if self.form == ROUTED else flat[: flat.shape[0] // self.experts])
        return None if mask is None else mask.reshape(-1)[rows.tokens]

    def x(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The activations among the arguments."""
        name = self.roles[0]
        position = self.names.index(name)
        return args[position] if position < len(args) else kwargs[name]
