"""Look at indices before a kernel gets them: on a GPU, one that is out of bounds ends what a process can do with its device.

What is tried in front of a model may be wrong (find.py).  On a CPU such an index is an error, for which the trial is dropped; on
CUDA it is an assertion inside the kernel, and whatever the process asks of its device afterwards fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
BY_AXIS = (aten.index_select, aten.gather, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce,
           aten.scatter_reduce_, aten.index_add,
           aten.index_add_, aten.index_copy, aten.index_copy_, aten.index_fill, aten.index_fill_)  # fmt: skip
BY_AXES = (aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_)
MASKS = (torch.bool, torch.uint8)  # of a wrong shape, they are an error on every device


class IndicesInBounds(TorchDispatchMode):
    """Every index that ATen's operations are given, in this thread.

    Raises:
        IndexError: before the operation runs.
    """

    supports_higher_order_operators = True  # flex attention, which is passed on

    @classmethod
    def is_infra_mode(cls) -> bool:
        """What the model compiles by itself stays compiled: flex attention, too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        for index, size, least in _indices(getattr(func, "overloadpacket", func), args):
            if index.numel() and not index.is_meta:
                low, high = (int(v) for v in torch.stack(index.aminmax()).tolist())
                if low < least or high >= size:
                    raise IndexError(f"{func}: indices {low} ... {high} are out of bounds of {size} entries")
        return func(*args, **(kwargs or {}))


def _indices(op: Any, args: Sequence[Any]) -> Iterator[tuple[Tensor, int, int]]:
    """(An index, the entries that it chooses from, the least that it may be)."""
    if op is aten.embedding:
        yield args[1], args[0].shape[0], 0
    elif op in BY_AXIS:
        yield args[2], args[0].shape[args[1]] if args[0].dim() else 1, 0
    elif op in BY_AXES:
        axis = 0
        for index in args[1]:
            if index is not None and index.dtype not in MASKS:
                yield index, args[0].shape[axis], -args[0].shape[axis]
            axis += index.dim() if index is not None and index.dtype in MASKS else 1
