"""A process group for a command that torchrun has started: `torchrun --nproc-per-node N -m mmqc quantize ...`.

torchrun sets    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def started() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return all(name in os.environ for name in VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def first() -> bool:
    """Whether it is the one that writes and speaks."""
    return not started() or os.environ["RANK"] == "0"


def here() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) if started() else 1


def own_device(device: str | None) -> str | None:
    """``device`` for this process: of an accelerator without a number, each process on a machine has its own."""
    return f"{device}:{os.environ['LOCAL_RANK']}" if started() and device in ("cuda", "xpu") else device


@contextmanager
def process_group() -> Iterator[None]:
    """The group for the length of a ``with`` block; nothing for a process that is alone.

    On a machine with GPUs this process's is the current one; with more processes than GPUs there is an error.

    Raises:
        ValueError: there is no GPU for this process.
    """
    if not started():
        yield
        return
    import torch
    import torch.distributed as dist

    count, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if count and local >= count:
        raise ValueError(
            f"torchrun started {here()} processes on a machine with {count} GPUs, and each needs one of its own; pass "
            f"--nproc-per-node {count}, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to quantize on the CPU"
        )
    if count:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if count else "gloo")
    yield
    dist.destroy_process_group()  # not after an error: it would wait for operations that nobody ends
