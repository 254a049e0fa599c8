"""How every mmqc op enters torch: schema, plain-torch reference, fake kernel, optional gradient.

``torch.library.define`` rather than ``custom_op``: the latter imports Dynamo at its first eager call and goes through more
Python in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

NAMESPACE = "mmqc"
_plain: ContextVar[bool] = ContextVar("quantized linears run as their references", default=False)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Quantized linears run as their references on a GPU too: nothing has to be compiled for a few calls that only look."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def in_plain_torch() -> bool:
    """Whether a call is inside ``plain_torch``."""
    return _plain.get()


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define the functional op ``mmqc::<schema>``; ``reference`` is its eager implementation on every device."""
    name = f"{NAMESPACE}::{schema.split('(', 1)[0]}"
    torch.library.define(name, schema[schema.index("(") :], tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "CompositeExplicitAutograd", reference)
    torch.library.register_fake(name, fake)
