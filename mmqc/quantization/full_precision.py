"""Products and convolutions of float32 in float32 meanwhile, whatever the GPU is allowed otherwise.

PyTorch lets cuDNN convolve float32 in TF32, 10 bits of mantissa, unless it is told not to; users allow it for matmuls too.  What
two models differ by there says nothing about their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 in the block; afterwards what was allowed before.

    A switch has an old name and a new one, and PyTorch raises where the old one is read after the new one was set: who has set it
    by one of them finds it set by that one.
    """
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    conv = _old(lambda: cudnn.allow_tf32)
    products = _old(torch.get_float32_matmul_precision)
    new = [(part, part.fp32_precision) for part in (cudnn.conv, matmul)]
    if conv is not None:
        cudnn.allow_tf32 = False
    if products is not None:
        torch.set_float32_matmul_precision("highest")
    for (part, _), old in zip(new, (conv, products), strict=True):
        if old is None:
            part.fp32_precision = "ieee"
    try:
        yield
    finally:
        if conv is not None:
            cudnn.allow_tf32 = conv
        if products is not None:
            torch.set_float32_matmul_precision(products)
        for part, precision in new:
            part.fp32_precision = precision


def _old(switch: Callable[[], Any]) -> Any:
    """By its old name; None where the new one was used."""
    try:
        return switch()
    except RuntimeError:
        return None
