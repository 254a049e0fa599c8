"""How every mmqc op enters torch: schema, plain-torch reference, fake kernel, optional gradient, kernel on CUDA.

Kernels are imported by the first call on CUDA, whoever makes it: ``import mmqc`` costs no Triton, and no call gets the slow
reference because nothing that imports kernels was imported before.

``torch.library.define`` rather than ``custom_op``: the latter imports Dynamo at its first eager call and goes through more
Python in every call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

NAMESPACE, KERNELS = "mmqc", "mmqc.kernels"
_told: dict[str, Callable[..., Any]] = {}  # what runs on CUDA, by the op's name
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
    """Define the functional op ``mmqc::<schema>``; ``reference`` is its eager implementation where there is no kernel."""
    name = f"{NAMESPACE}::{schema.split('(', 1)[0]}"
    torch.library.define(name, schema[schema.index("(") :], tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "CompositeExplicitAutograd", reference)
    torch.library.impl(name, "CUDA", _there(name, reference))
    torch.library.register_fake(name, fake)


def use_on_cuda(implementation: Callable[..., Any]) -> None:
    """Makes a function the implementation on CUDA of the op that has its name."""
    _told[f"{NAMESPACE}::{implementation.__name__}"] = implementation


def _there(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """What torch calls on CUDA.  It stays: torch frees a kernel that is taken back, and this one may be running then."""

    def on_cuda(*args: Any, **kwargs: Any) -> Any:
        return (_told.get(name) or _loaded(name, reference))(*args, **kwargs)

    return on_cuda


def _loaded(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    importlib.import_module(KERNELS).install()
    return _told.setdefault(name, reference)
