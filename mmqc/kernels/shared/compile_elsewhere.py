"""A kernel compiled by another process, which has no GPU of its own: what it makes is found in Triton's cache.

    sent(launch, device)      what the other process needs to know, to be pickled
    compile_sent(known)       there: compile, for that device, into that cache

Why:     Triton walks a kernel's source in Python.  A thread does it between the steps of a thread that traces a graph, and both
         wait for the same lock.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmqc.kernels.shared.launch import Launch, Shape

CACHE = "TRITON_CACHE_DIR"


class Sent(NamedTuple):
    """A launch without its kernel and its tensors.

    Attributes:
        module, name: of the kernel.
        launch: the rest, of ``Shape``s.
        target: what it is compiled for: backend, architecture and threads of a warp.
        cache: the directory of Triton's cache; None if it is where Triton has it.
    """

    module: str
    name: str
    launch: Launch
    target: tuple[Any, ...]
    cache: str | None


def sent(launch: Launch, device: torch.device) -> Sent:
    """What another process compiles this launch from; ``device`` is the one that it will run on."""
    with torch.cuda.device(device):
        target: Any = driver.active.get_current_target()
    args = {name: Shape(tuple(v.shape), v.dtype, v.device) if isinstance(v, Tensor) else v for name, v in launch.args.items()}
    function = launch.kernel.fn
    return Sent(
        function.__module__, function.__name__,
        launch._replace(kernel=None, args=args, descriptors=dict(launch.descriptors)),
        (target.backend, target.arch, target.warp_size), os.environ.get(CACHE),
    )  # fmt: skip


def compile_sent(known: Sent) -> None:
    """Compile it."""
    kernel = getattr(importlib.import_module(known.module), known.name)
    with _cache(known.cache), _told(GPUTarget(*known.target)):
        known.launch._replace(kernel=kernel).compile()


class _Told:
    """As much of Triton's driver as a compilation asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def _told(target: GPUTarget) -> Iterator[None]:
    before = driver._active
    driver.set_active(_Told(target))  # pyright: ignore[reportArgumentType]  all of it that is asked for
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def _cache(path: str | None) -> Iterator[None]:
    before = os.environ.pop(CACHE, None)
    os.environ.update({} if path is None else {CACHE: path})
    try:
        yield
    finally:
        os.environ.pop(CACHE, None)
        os.environ.update({} if before is None else {CACHE: before})
