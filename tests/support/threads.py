"""Threads that run models in step: what each does in one call falls between two calls of the other."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn


def in_step(runs: Sequence[Callable[[], Any]], models: Sequence[nn.Module], module: str) -> list[Any]:
    """Results of ``runs``, each in a thread; their models wait for each other before every call of ``module``."""
    barrier = threading.Barrier(len(runs), timeout=60)

    def wait(*call: Any) -> None:
        barrier.wait()

    handles = [model.get_submodule(module).register_forward_pre_hook(wait) for model in models]
    with ThreadPoolExecutor(len(runs)) as pool:
        results = [future.result() for future in [pool.submit(run) for run in runs]]
    for handle in handles:
        handle.remove()
    return results
