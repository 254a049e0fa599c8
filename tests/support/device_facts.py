"""A Hopper device that is not there: what launchers and lowerings are told of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

FACTS = {
    "capability": lambda device: 90,
    "multiprocessors": lambda device: 132,
    "shared_bytes": lambda device: 232_448,
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
