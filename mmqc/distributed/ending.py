"""What has to be gone before the process group ends: recorded launches, which hold its communicators.

NCCL counts the CUDA graphs that its collectives were recorded in, and the end of a communicator waits until they are gone
(pytorch issue 115388).  A script that keeps a model and ends its group, or just ends, would wait for ever.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_pending: dict[Callable[[], None], None] = {}  # in the order in which they came


def before_the_group_ends(let_go: Callable[[], None]) -> None:
    """Call ``let_go`` before the default process group is destroyed, or the process exits; once, however often it is given."""
    _pending[let_go] = None
    _watch()


@functools.cache
def _watch() -> None:
    module: Any = dist.distributed_c10d
    destroy = module.destroy_process_group

    @functools.wraps(destroy)
    def wrapped(group: Any = None) -> None:
        if group is None or group == dist.GroupMember.WORLD:
            _let_go()
        destroy(group)

    dist.destroy_process_group = module.destroy_process_group = wrapped
    atexit.register(_let_go)


def _let_go() -> None:
    while _pending:
        let_go = next(iter(_pending))
        del _pending[let_go]
        let_go()
