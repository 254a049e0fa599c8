"""What passes do to an axis of a weight, as values: each can be applied to the weight, to an adapter's factor, and written down.

    W <- W M  or  W <- M W        M linear, along one axis, on ``groups`` of its places
    b <- b + W β                  where a norm's bias goes into a reader: ``Moved``

Shapes:  W [N, K, ...]   groups int64 [copies, n]   v [..., copies, n], what a change maps to the like
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmqc.ops.hadamard import apply_factors
from mmqc.ops.hadamard_matrix import hadamard_factors
from mmqc.ops.rotate import mean_reflection, random_hadamard, reflect
from mmqc.ops.rotate import reference as rotated


@dataclass(frozen=True, eq=False)
class Times:
    """v ∘ s, s [n] or [copies, n]: gains, signs, factors of channels."""

    factors: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """In v's dtype."""
        return v * self.factors.to(v)


@dataclass(frozen=True)
class Centred:
    """v - mean(v)."""

    def __call__(self, v: Tensor) -> Tensor:
        """In v's dtype."""
        return v - v.mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Turned:
    """v R, R = diag(signs) H, with a reflection behind it if it has to keep means; R follows from width and seed."""

    seed: int
    keep_mean: bool
    factors: list[Tensor]
    signs: Tensor
    mirror: Tensor | None

    @classmethod
    def of(cls, width: int, seed: int, keep_mean: bool) -> Turned:
        """That of all spaces of one width and seed."""
        factors, signs = random_hadamard(width, seed)
        return cls(seed, keep_mean, factors, signs, mean_reflection(factors, signs) if keep_mean else None)

    def __call__(self, v: Tensor) -> Tensor:
        """In v's dtype."""
        y = rotated(v, [f.to(v) for f in self.factors], self.signs.to(v), inverse=False)
        return y if self.mirror is None else reflect(y, self.mirror.to(v))


@dataclass(frozen=True, eq=False)
class Based:
    """v U, U [n, n] a basis that was computed elsewhere."""

    matrix: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """In v's dtype."""
        return v @ self.matrix.to(v)


@dataclass(frozen=True, eq=False)
class Spread:
    """v Hᵀ, for a linear that multiplies its input by H first; H follows from the width and the number of blocks."""

    width: int
    factors: list[Tensor]
    blocks: int = 1

    @classmethod
    def of(cls, width: int, blocks: int = 1) -> Spread:
        """That of every linear of one width."""
        return cls(width, hadamard_factors(width, blocks), blocks)

    def __call__(self, v: Tensor) -> Tensor:
        """In v's dtype."""
        return apply_factors(v, [f.to(v) for f in self.factors])


Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Placed:
    """A change on groups of places of an axis; calling it changes a whole weight.  Without groups the axis is one."""

    axis: int
    groups: Tensor | None
    change: Change

    def __call__(self, weight: Tensor) -> Tensor:
        """Of the weight's shape and dtype."""
        last = weight.movedim(self.axis, -1)
        if self._is_whole(last.shape[-1]):
            return self.change(last[..., None, :]).squeeze(-2).movedim(-1, self.axis)
        assert self.groups is not None
        groups = self.groups.to(weight.device)
        out = last.clone()
        out[..., groups.reshape(-1)] = self.change(last[..., groups]).flatten(-2)
        return out.movedim(-1, self.axis)

    def _is_whole(self, size: int) -> bool:
        g = self.groups
        return g is None or (len(g) == 1 and g.shape[1] == size and torch.equal(g[0].cpu(), torch.arange(size)))


@dataclass(frozen=True, eq=False)
class Moved:
    """b <- b + W[..., groups] β, the weight as it is when this comes; β [n]."""

    axis: int
    groups: Tensor
    beta: Tensor

    def __call__(self, weight: Tensor) -> Tensor:
        """What b gains, [N]."""
        columns = weight.movedim(self.axis, -1)[..., self.groups.to(weight.device)]
        return (columns * self.beta.to(weight)).flatten(1).sum(1)


@dataclass(frozen=True)
class Unknown:
    """A step that is no such value; its formula."""

    formula: str


Step = Placed | Moved | Unknown
