"""Whether tensors are what they were when something was derived from them, asked before every call of a compiled graph.

    the object     by its id
    its version    autograd's count of in-place writes: optimizers, ``copy_``, ``load_state_dict``
    its memory     the address, in a storage that is still alive: ``.data = ``, ``Module.to``, ``swap_tensors``; and another
                   tensor that got the id of one that is gone
    samples        some of its values, on the CPU alone: a write through ``.data`` leaves no trace, not even in the version

Cost:     0.4 us for a tensor on the CPU, 0.25 us on another device, where reading values would make the host wait.
Keeps:    a weak reference to the storage, so that what was replaced is freed, and none to the tensor, which swap_tensors refuses;
          on the CPU, the samples keep the storage until the next call.
Misses:   a write through ``.data``, or by another library, to a tensor of another device, or to so few values of one on the CPU
          that no sample is among them.  ``torch.autograd.graph.increment_version(tensor)`` after it says so.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SAMPLES = 16
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16
_version = operator.attrgetter("_version")
_expired = torch.UntypedStorage._expired  # type: ignore[attr-defined]


class Stamp:
    """What some tensors were."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.ids = list(map(id, tensors))
        self.versions = versions(tensors)
        self.addresses = [address(t) for t in tensors]
        self.storages = [StorageWeakRef(t.untyped_storage()) for t in tensors if address(t)]
        self.storage_ids = [s.cdata for s in self.storages]
        self.samples = [s for t in tensors if (s := sample(t)) is not None]
        self.values = list(map(np.ndarray.tobytes, self.samples))

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, unchanged; loops in C."""
        return (
            list(map(id, tensors)) == self.ids
            and versions(tensors) == self.versions
            and list(map(address, tensors)) == self.addresses
            and not any(map(_expired, self.storage_ids))
            and list(map(np.ndarray.tobytes, self.samples)) == self.values
        )


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Counts of in-place writes; 0 for an inference tensor, which has none."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in tensors]


def address(tensor: Tensor) -> int:
    """Where the values begin; 0 for a subclass that holds other tensors, or none at all."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def sample(tensor: Tensor) -> Any:
    """Some values of a dense tensor on the CPU, as a numpy array that sees what becomes of them; None of another."""
    size = tensor.dtype.itemsize
    if tensor.device.type != "cpu" or not address(tensor) or not tensor.is_contiguous() or size not in INTEGERS:
        return None
    with torch.no_grad():
        flat = tensor.detach().view(-1).view(INTEGERS[size]).numpy()
    # a step that is no multiple of a row, so that the samples are of many columns
    step = max(1, len(flat) // SAMPLES) + (int(0.38 * tensor.shape[-1]) if len(flat) > SAMPLES**2 else 0)
    return flat[::step]
