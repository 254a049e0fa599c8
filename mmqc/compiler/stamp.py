"""Whether tensors are what they were when something was derived from them, asked before every call of a compiled graph.

    the object     by its id
    its version    autograd's count of in-place writes: optimizers, ``copy_``, ``load_state_dict``
    its memory     the address, in a storage that is still alive: ``.data = ``, ``Module.to``, ``swap_tensors``; and another
                   tensor that got the id of one that is gone
    samples        some of its values, on the CPU alone: a write through ``.data`` leaves no trace, not even in the version

Cost:     0.4 us for a tensor on the CPU, 0.2 us on another device, where reading values would make the host wait.
Keeps:    a weak reference to the storage, so that what was replaced is freed, and none to the tensor, which swap_tensors would
          refuse; on the CPU, the storage itself, until the next call.
Misses:   a write through ``.data``, or by another library, to a tensor of another device, or to so few values of one on the CPU
          that no sample is among them.  ``torch.autograd.graph.increment_version(tensor)`` after it says so.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

WORDS = (ctypes.c_int64, ctypes.c_int32, ctypes.c_int16, ctypes.c_int8)
SAMPLES = 4  # the first and the last among them
CANDIDATES = 64  # zeros stay zeros when a weight is scaled: other values are looked for
_version = operator.attrgetter("_version")
_value = operator.attrgetter("value")
expired = torch.UntypedStorage._expired  # type: ignore[attr-defined]


class Stamp:
    """What some tensors were.  Whoever keeps one finds it by their ids."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.versions = versions(tensors)
        self.addresses = addresses(tensors)
        self.held = [t.untyped_storage() for t in tensors if on_cpu(t)]
        self.storages = [StorageWeakRef(t.untyped_storage()) for t in tensors if address(t) and not on_cpu(t)]
        self.storage_ids = [s.cdata for s in self.storages]
        self.words = [word for t in tensors if on_cpu(t) for word in words(t)]
        self.values = list(map(_value, self.words))

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors, of the same ids, are as they were; loops in C."""
        return (
            versions(tensors) == self.versions
            and addresses(tensors) == self.addresses
            and list(map(_value, self.words)) == self.values
            and not any(map(expired, self.storage_ids))
        )


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Counts of in-place writes; 0 for an inference tensor, which has none."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in tensors]


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where the values begin; 0 for a subclass that holds other tensors, or none at all."""
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return [address(t) for t in tensors]


def address(tensor: Tensor) -> int:
    """Of one tensor."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def on_cpu(tensor: Tensor) -> bool:
    """Whether its values can be read at no cost."""
    return tensor.device.type == "cpu" and address(tensor) != 0


def words(tensor: Tensor) -> Iterator[Any]:
    """Some of the memory that a tensor's values lie in, spread over it; what these objects hold is what is there now.

    The storage has to be kept as long as they are read.
    """
    size = tensor.dtype.itemsize
    reach = size * (1 + sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
    kind = next(kind for kind in WORDS if ctypes.sizeof(kind) <= reach)
    n = reach // ctypes.sizeof(kind)
    places = [address(tensor) + ctypes.sizeof(kind) * (i * (n - 1) // (CANDIDATES - 1)) for i in range(CANDIDATES)]
    every = list(map(kind.from_address, places))
    found = [word for word in every if word.value]
    if len(found) < SAMPLES:  # of a tensor of zeros, zeros
        found = every
    yield from (found[i * (len(found) - 1) // (SAMPLES - 1)] for i in range(SAMPLES))
