"""An out-of-memory error of ``quantize_`` that says where it happened and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mmqc.errors import MEMORY, MmqcError
from mmqc.quantization.progress import Progress


class OutOfMemoryError(MmqcError, MemoryError, RuntimeError):
    """Memory ran out: names the step, and what takes less."""

    exit_code = MEMORY


@contextmanager
def explained(bar: Progress) -> Iterator[None]:
    """Turn out-of-memory errors of the host and of accelerators into ``OutOfMemoryError``."""
    try:
        yield
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
