"""A device that is not there, Hopper's unless told: what launchers and lowerings are told of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SHARED = {80: 166_912, 86: 101_376, 90: 232_448}  # bytes that a program may have: an A100, other Amperes and Ada, Hopper
FACTS = {
    "capability": lambda device: 90,
    "multiprocessors": lambda device: 132,
    "shared_bytes": lambda device: SHARED[90],
    "has_warpgroup_products": lambda device: True,
    "has_inline_ptx": lambda device: True,
}


def pretend(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """In every module of mmqc that asks."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("mmqc.")]
    for name, answer in (FACTS | more).items():
        for module in modules:
            if callable(getattr(module, name, None)):
                monkeypatch.setattr(module, name, answer)


@contextmanager
def pretending(architecture: int, **more: Any) -> Iterator[None]:
    """``pretend`` for a while, of another architecture."""
    with pytest.MonkeyPatch.context() as patch:
        told = {"capability": architecture, "shared_bytes": SHARED[architecture], "has_warpgroup_products": architecture == 90}
        pretend(patch, **{name: lambda _, answer=answer: answer for name, answer in told.items()}, **more)
        yield
