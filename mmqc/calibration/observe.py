"""Statistics of live forwards: one per place of a model, with hooks for the length of a ``with`` block.

    with observe(model, {"layers.0.up": Peak(), Output("layers.0"): Range()}) as seen:
        model(**batch)
    seen["layers.0.up"].value

    place               ``update`` gets
    "layers.0.up"       x [*, K], what the weight of this linear multiplies: its input, behind its online Hadamard if it has one
    Call("layers.0")    args, kwargs of a module, before it runs
    Output("layers.0")  what a module returned, and its args, kwargs

A place of another kind has ``watch(model, update)``, a context manager (kv/attention_calls.py: the operands of attention).  All
that is seen is in the statistics, nothing in a module or a class: two observations, in two threads say, share no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from mmqc.nn.online_hadamard import OnlineHadamard

P = TypeVar("P")
S = TypeVar("S")
Update = Callable[..., None]


@dataclass(frozen=True)
class Call:
    """The arguments of a module's calls, by module FQN."""

    module: str


@dataclass(frozen=True)
class Output:
    """What a module returns, by module FQN."""

    module: str


@contextmanager
def observe(model: nn.Module, places: Mapping[P, S]) -> Iterator[Mapping[P, S]]:
    """Feed the statistics while the ``with`` block runs; hooks are gone afterwards, also after an error.

    Args:
        model: whose forwards, or whose modules' forwards, are run in the block.
        places: statistics, which are objects with ``update`` or functions, by place.

    Returns:
        ``places``.
    """
    with ExitStack() as stack:
        for place, statistic in places.items():
            stack.enter_context(_watched(model, place, getattr(statistic, "update", statistic)))
        yield places


def _watched(model: nn.Module, place: Any, update: Any) -> AbstractContextManager[Any]:
    def see(*values: Any) -> None:  # what a hook returns would take the place of arguments or outputs
        update(*values)

    if isinstance(place, str):
        hook = lambda linear, args: see(linear_input(linear, args[0].detach()))  # noqa: E731
        return model.get_submodule(place).register_forward_pre_hook(hook)
    if isinstance(place, Call):
        hook = lambda module, args, kwargs: see(args, kwargs)  # noqa: E731
        return model.get_submodule(place.module).register_forward_pre_hook(hook, with_kwargs=True)
    if isinstance(place, Output):
        hook = lambda module, args, kwargs, output: see(output, args, kwargs)  # noqa: E731
        return model.get_submodule(place.module).register_forward_hook(hook, with_kwargs=True)
    return place.watch(model, update)


def linear_input(linear: nn.Module, x: Tensor) -> Tensor:
    """What the weight of ``linear`` multiplies when ``x`` is its input."""
    return linear.rotated(x) if isinstance(linear, OnlineHadamard) else x
