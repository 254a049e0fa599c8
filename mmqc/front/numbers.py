"""Whole numbers in place of an integer tensor: code that reckons with sizes and asks for them gets numbers that Dynamo knows.

    grid.prod(-1) // merge**2, and .tolist() of it;   for t, h, w in grid: x.view(t, h // m, m, ...)

A tensor's own numbers are data, and a graph cannot depend on them; these are as good as the sizes of its inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Numbers(list[Any]):
    """A vector of numbers, or a matrix: a list of vectors.  What it does not know of a tensor's methods is an error."""

    @classmethod
    def of(cls, tensor: Tensor) -> Numbers:
        """Those of an integer tensor of one dimension or two."""
        return cls(cls.of(row) if row.dim() else row.item() for row in tensor)

    def tolist(self) -> list[Any]:
        """As ``Tensor.tolist``."""
        return [row.tolist() if isinstance(row, Numbers) else row for row in self]

    @property
    def shape(self) -> tuple[int, ...]:
        """As ``Tensor.shape``."""
        return (len(self), len(self[0])) if self and isinstance(self[0], Numbers) else (len(self),)

    def prod(self, dim: int = -1) -> Any:
        """Over the last dimension: of a matrix the rows' products, of a vector a number."""
        return self._over(dim, operator.mul, 1)

    def sum(self, dim: int = -1) -> Any:
        """Over the last dimension, as ``prod``."""
        return self._over(dim, operator.add, 0)

    def _over(self, dim: int, op: Callable[[Any, Any], Any], start: int) -> Any:
        last = len(self.shape) - 1
        if dim not in (-1, last):
            raise ValueError(f"dimension {dim} of numbers of shape {self.shape}: only the last one is known")
        if last:
            return Numbers([row._over(-1, op, start) for row in self])
        for number in self:
            start = op(start, number)
        return start

    def _with(self, op: Callable[[Any, Any], Any], other: Any) -> Numbers:
        pairs = zip(self, other, strict=True) if isinstance(other, Numbers) else ((mine, other) for mine in self)
        return Numbers([mine._with(op, its) if isinstance(mine, Numbers) else op(mine, its) for mine, its in pairs])

    def __add__(self, other: Any) -> Numbers:  # type: ignore[override]
        return self._with(operator.add, other)

    def __sub__(self, other: Any) -> Numbers:
        return self._with(operator.sub, other)

    def __mul__(self, other: Any) -> Numbers:  # type: ignore[override]
        return self._with(operator.mul, other)

    def __floordiv__(self, other: Any) -> Numbers:
        return self._with(operator.floordiv, other)

    def __pow__(self, other: Any) -> Numbers:
        return self._with(operator.pow, other)
