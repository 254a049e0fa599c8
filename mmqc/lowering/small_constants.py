"""Small constants of a package for a GPU stay in its memory: Inductor writes up to eight numbers into the code that reads them.

    input scale [1]        a kernel that writes 0.0295 somewhere, in front of each launch that reads an address    ->    the address

Why:     quantizations and products of ours read scales by address: up to six launches of 0.7 us in each layer of a decoding step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor
from torch._inductor.graph import GraphLowering

_can_inline = GraphLowering.can_inline_constant


@contextmanager
def small_constants_in_memory() -> Iterator[None]:
    """In graphs that are lowered meanwhile; on a CPU, whose code is fused with what reads them, they are as ever."""
    with mock.patch.object(GraphLowering, "can_inline_constant", staticmethod(can_inline)):
        yield


def can_inline(constant: Tensor) -> bool:
    """Whether the numbers may stand in generated code."""
    return not constant.is_cuda and _can_inline(constant)
