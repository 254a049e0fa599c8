"""Variables of the environment, set for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables in the block, and afterwards as they were before.

    No others are touched, unlike by ``mock.patch.dict(os.environ)``, which puts all back: what Inductor sets once for a process
    while a block is open, the assembler of Triton's kernels among it, would be gone behind it, under threads that compile.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
