"""Work on a model in eval mode that gives it back in the modes it came in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module of ``model`` in eval mode; afterwards each has its own mode again, and modules put in meanwhile the model's."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])
        for module, training in modes.items():  # parts may be in another mode than the whole
            module.training = training
