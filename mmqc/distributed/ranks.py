"""What ``quantize_`` asks of the processes that it runs in; alone, everything is one's own.

    mine        the items that this rank has to do            collected   the results of all, in the items' order
    shared      what one rank made, on all                    owners      which rank makes which
    summed      tensors, added up in the ranks' order         largest     tensors, the maximum

Each is called by all ranks, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
K = TypeVar("K")


class Ranks:
    """One process alone.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Whether it is this process that writes and shows progress."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> Sequence[T]:
        """The part of ``items`` that this rank does."""
        return items

    def collected(self, own: Sequence[T]) -> Sequence[T]:
        """``own`` of all ranks, one after the other; of ``mine(items)`` that is the order of ``items``."""
        return own

    def shared(self, make: Callable[[], T], owner: int = 0) -> T:
        """What ``make`` returns on rank ``owner``; on the others it is not called.  Tensors are on each rank's own device."""
        return make()

    def summed(self, parts: Mapping[K, Tensor], owners: Mapping[K, int] | None = None) -> dict[K, Tensor]:
        """Tensors by name, added over the ranks that have them; may be done in place.

        Args:
            parts: names and shapes are equal on all ranks that have them.
            owners: the only rank that wants a tensor; None: all do.
        """
        return dict(parts)

    def largest(self, parts: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """As ``summed``, the maximum of each element."""
        return dict(parts)

    def owners(self, costs: Sequence[float]) -> list[int]:
        """The rank of each item, so that all have about the same to do."""
        return [0] * len(costs)

    def tell(self, error: BaseException) -> None:
        """The others are to end with this error."""


ALONE = Ranks()
