"""A model as it is without ``torch.compile``, for a forward that is run to be watched, recorded or calibrated.

    with uncompiled(model): model.forward(**inputs)

Why:   ``model.forward = torch.compile(model.forward, backend="mmqc")`` leaves a function of Dynamo's where the forward was, and a
       part of the model may be compiled as well: watched, the forward would begin a second compilation inside the first;
       recorded, Dynamo would trace the recording.
What:  ``forward`` in a module's own attributes (``torch.compile(module)`` has one too), and what ``module.compile()`` left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from mmqc.graph.tracing import not_compiled

COMPILED_CALL = "_compiled_call_impl"


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Put what was handed to ``torch.compile`` in the place of what it gave, until the end."""
    kept = []
    for module in model.modules():
        own = vars(module)
        plain: dict[str, Any] = {"forward": not_compiled(own["forward"])} if "forward" in own else {}
        if own.get(COMPILED_CALL) is not None:
            plain[COMPILED_CALL] = None
        kept += [(own, name, own[name]) for name, value in plain.items() if value is not own[name]]
        own.update(plain)
    try:
        yield
    finally:
        for own, name, value in kept:
            own[name] = value
