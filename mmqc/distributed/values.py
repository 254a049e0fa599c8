"""Any value as bytes and tensors, so that tensors travel as they are and the rest by pickle, between processes of one program."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Meta = tuple[tuple[int, ...], torch.dtype, str]  # shape, dtype, and the kind of device


def taken_apart(value: Any) -> tuple[bytes, list[Tensor]]:
    """(bytes, tensors) of a value: what a copy of it is put together from."""
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            if not isinstance(obj, Tensor):
                return None
            tensors.append(obj.detach().contiguous())
            return len(tensors) - 1

    body = io.BytesIO()
    Pickler(body, pickle.HIGHEST_PROTOCOL).dump(value)
    metas: list[Meta] = [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]
    return pickle.dumps((metas, body.getvalue())), tensors


def places(content: bytes) -> list[Meta]:
    """What tensors belong to it."""
    return pickle.loads(content)[0]


def put_together(content: bytes, tensors: Sequence[Tensor]) -> Any:
    """The value."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> Tensor:
            return tensors[pid]

    return Unpickler(io.BytesIO(pickle.loads(content)[1])).load()


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [n]: what every backend can send."""
    return tensor.reshape(-1).view(torch.uint8)
