"""Work on a model in eval mode, and restore its modules' modes afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module of ``model`` into eval mode; afterwards each gets its own mode back, and new modules get the model's."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])
        for module, training in modes.items():  # parts may be in another mode than the whole
            module.training = training
