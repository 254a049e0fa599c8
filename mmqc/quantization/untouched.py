"""What forwards of calibration change besides the model's weights, put back when ``quantize_`` is done: buffers, random numbers.

A forward may count its calls in a buffer, or draw noise from torch's generators; to quantize a model is no use of it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Place = tuple[int, str]  # of a buffer: the id of its module, and its name there


@contextmanager
def untouched(model: nn.Module, rewritten: Container[Place] = ()) -> Iterator[None]:
    """Give every buffer its value back, but those that were ``rewritten`` on purpose; and torch's generators their states."""
    buffers = ((m, name, b) for m in model.modules() for name, b in m._buffers.items())
    before = [(m, name, b, b.detach().clone()) for m, name, b in buffers if b is not None and not b.is_meta]
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        for module, name, buffer, value in before:
            if (id(module), name) not in rewritten:
                _restore(module, name, buffer, value)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@torch.no_grad()
def _restore(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    if buffer.shape != value.shape or buffer.device != value.device or not _same(buffer, value):
        buffer.data = value
    module._buffers[name] = buffer


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())
