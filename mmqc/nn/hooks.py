"""Find and remove the forward hooks that an object of ours hung on a model: its hooks are its bound methods."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


def hooked(model: nn.Module, owner: type[T]) -> T | None:
    """The object of class ``owner`` whose pre-hook ``model`` carries, if any."""
    found = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((o for o in found if isinstance(o, owner)), None)


def unhook(model: nn.Module, owner: type[Any]) -> None:
    """Remove the hooks of objects of class ``owner`` from ``model``."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), owner):
                del hooks[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)
                model._forward_hooks_always_called.pop(key, None)
