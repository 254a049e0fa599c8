"""Whether a value of the graph that is being lowered is in memory by then, with nothing in front of it that could be joined."""

from __future__ import annotations

from typing import Any

from torch._inductor.ir import Buffer, ComputedBuffer, is_contiguous_storage_and_layout

from mmqc.lowering.inductor import TensorBox


def is_in_memory(x: TensorBox) -> bool:
    """Whether a call, a launch or the caller has written x, in row-major order.

    What Inductor itself computes into a buffer it joins with what reads the buffer, if that is its own too.
    """
    if not is_contiguous_storage_and_layout(x):
        return False
    buffer: Any = x
    while not isinstance(buffer, Buffer):
        buffer = buffer.data
    return not isinstance(buffer, ComputedBuffer) or 0 in buffer.data.get_size()  # memory that a launch fills has no loop
