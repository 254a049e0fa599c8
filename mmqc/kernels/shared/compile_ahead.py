"""Kernels that will be wanted, compiled while something else is being done.

    ahead(launches)      compile the kernels of launches, of tensors or of ``Shape``s, each once
    wait()               until all of them are
    hand_over(to)        let other processes compile; a thread then loads what they made

Why:     which kernel a number of rows takes is known when it comes, and compiling one takes seconds.  Triton's passes and ptxas
         run outside of Python's lock, its walk through the source does not.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from mmqc.kernels.shared.compile_elsewhere import Sent, sent
from mmqc.kernels.shared.launch import Launch

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_known: set[Hashable] = set()
_running: list[Future[None]] = []
_pool: list[ThreadPoolExecutor] = []
_elsewhere: list[Callable[[Sent], Future[Any] | None]] = []


def hand_over(to: Callable[[Sent], Future[Any] | None]) -> None:
    """``to`` has ``compile_sent`` called in another process, or gives None: then it is compiled here."""
    _elsewhere[:] = [to]


def ahead(launches: Iterable[Launch], device: torch.device) -> None:
    """Begin to compile what was not asked for before; the launches are made by a worker, too."""
    with _lock:
        _running.append(_workers().submit(_find, launches, device))


def wait() -> None:
    """Until nothing is being compiled; an error comes again where the kernel is launched."""
    while True:
        with _lock:
            running, _running[:] = list(_running), []
        if not running:
            return
        for one in running:
            one.exception()


def _find(launches: Iterable[Launch], device: torch.device) -> None:
    for launch in launches:
        key = launch.specialisation()
        with _lock:
            if key not in _known:
                _known.add(key)
                _running.append(_workers().submit(_compile, launch, device))


def _workers() -> ThreadPoolExecutor:
    if not _pool:
        _pool.append(ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1), thread_name_prefix="mmqc-compile"))
    return _pool[0]


def _compile(launch: Launch, device: torch.device) -> None:
    if _elsewhere:
        try:
            made = _elsewhere[0](sent(launch, device))
            if made is not None:
                made.result()
        except Exception as error:  # it is compiled here, and an error of its own comes again
            logger.info("%s was not compiled by another process: %s", launch.kernel.__name__, error)
    with torch.cuda.device(device):
        compiled = launch.compile()
        getattr(compiled, "run", None)  # which loads it
