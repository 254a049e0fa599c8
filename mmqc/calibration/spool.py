"""Activations that wait for the next block: in host memory (pinned where they come from an accelerator) or in files.

Whatever is taken out is a copy, so that a block may write to its inputs.  Nobody but the accelerator that made a tensor reads it
again, in the order of its stream: neither way waits for it.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Spool:
    """``put`` gives a ticket, ``get`` the tensor for a ticket on a device, ``drop`` frees it.

    Args:
        folder: where files go, in a folder of their own that ``close`` removes; None means host memory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder: Path | None = None
        self.numbers = itertools.count()
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="activations-", dir=folder))

    def close(self) -> None:
        """Delete what is left."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def put(self, value: Any) -> Any:
        """Store a tensor; other values are their own tickets."""
        if not isinstance(value, Tensor):
            return value
        if self.folder is not None:
            from safetensors.torch import save_file

            path = self.folder / f"{next(self.numbers)}.safetensors"
            save_file({"x": value.detach().contiguous()}, path)
            return path
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return host.copy_(value.detach(), non_blocking=value.is_cuda)

    def get(self, ticket: Any, device: torch.device) -> Any:
        """A copy on ``device``."""
        if isinstance(ticket, Path):
            from safetensors.torch import load_file

            return load_file(ticket)["x"].to(device)
        if not isinstance(ticket, Tensor):
            return ticket
        if device.type == "cpu" and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return ticket.to(device, non_blocking=True, copy=True)

    def drop(self, ticket: Any) -> None:
        """Delete its file, if it is one."""
        if isinstance(ticket, Path):
            ticket.unlink(missing_ok=True)
