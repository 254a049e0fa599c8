"""A launch as it would be chosen on another device, of which its architecture and its shared memory are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest import mock

SHARED = {80: 166_912, 86: 101_376, 90: 232_448}  # bytes that a program may have: an A100, other Amperes and Ada, Hopper


@contextmanager
def chosen_for(architecture: int, *modules: ModuleType) -> Iterator[None]:
    """What these modules ask of the device is answered for this one."""
    answers = {"capability": architecture, "shared_bytes": SHARED[architecture]}
    with ExitStack() as stack:
        for module in modules:
            for name, answer in answers.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, lambda _device, answer=answer: answer))
        yield
