"""Calls whose result is as large as the values of a tensor say: who asks for its size asks for these values.

nonzero, argwhere, where(c), unique, masked_select, x[mask], repeat_interleave(x, n), arange(n)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SIZE_READS = frozenset(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave"))


def sizing(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The operands of a torch function whose values decide how large its result is."""
    given = [*args, *kwargs.values()]
    if name == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        return _tensors([] if "output_size" in kwargs else [repeats])
    if name == "masked_select":
        return _tensors([kwargs.get("mask", args[-1])])
    if name in SIZE_READS or (name == "where" and len(given) == 1):
        return _tensors(given[:1])
    if name in ("__getitem__", "index"):
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return [k for k in _tensors(keys) if k.dtype in (torch.bool, torch.uint8) and k.dim()]
    return _tensors(args) if name in ("arange", "linspace") else []


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor)]


def cut_by_values(name: str, args: Sequence[Any]) -> bool:
    """Whether a torch function reads the bounds of a slice out of tensors: x[:n], x[a:b] = 0."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(bound, Tensor) for k in keys if isinstance(k, slice) for bound in (k.start, k.stop, k.step))
