"""The progress of ``quantize_``: a bar (step, loss, memory, time left), and memory errors that name the step they happened in."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm

from mmqc.calibration.measure import Loss
from mmqc.errors import MEMORY, MmqcError


class OutOfMemoryError(MmqcError, MemoryError, RuntimeError):
    """Memory ran out: names the step, and what takes less."""

    exit_code = MEMORY


class Progress:
    """A bar over linears.

    Args:
        shown: False draws nothing.
        device: whose memory is shown; None and a CPU show the process's peak.
    """

    def __init__(self, shown: bool, device: Any = None) -> None:
        self.what = "recording"
        self.bar: Any = tqdm(disable=not shown, unit=" linears", desc=self.what)
        self.device = torch.device("cpu" if device is None else device)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()

    def expect(self, linears: int) -> None:
        """So many linears will be quantized."""
        self.bar.total = linears
        self.bar.unpause()
        self.bar.refresh()

    def say(self, what: str) -> None:
        """What is being done now."""
        self.what = what
        self.bar.set_description(what)

    def done(self, linears: int, losses: Mapping[str, Loss]) -> None:
        """So many more linears are quantized, with these losses."""
        found = [loss.relative() for loss in losses.values()]
        about = {"loss": f"{sum(found) / len(found):.1e}"} if found else {}
        self.bar.set_postfix(about | {"memory": f"{memory(self.device) / 1e9:.1f} GB"}, refresh=False)
        self.bar.update(linears)


def memory(device: torch.device) -> int:
    """Peak bytes: allocated on an accelerator, resident of this process for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def explained(bar: Progress) -> Iterator[None]:
    """Turn out-of-memory errors of the host and of accelerators into ``OutOfMemoryError``; one that is explained stays as it is."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the accelerator ran out of memory at {bar.what} ({str(error).splitlines()[0]}). Pass batches of fewer rows or "
            'tokens; or leave the model in host memory and pass device="cuda", which holds one block at a time there'
        ) from error
    except MemoryError as error:
        raise OutOfMemoryError(
            f"the host ran out of memory at {bar.what}. Pass fewer calibration samples, or spool=<a folder>, which keeps the "
            "activations between blocks in files"
        ) from error
