"""Modules that no recorded batch reached, beside others of their kind that were: experts that nothing was routed to.

The rewrites are proved on what was recorded.  An unseen expert would read a rotated stream with unrotated weights, so
streams that its siblings touch are left alone.  Where the unseen ones are the last of a list (a tower of which only the
first layers are used) the rewrites go ahead, and a hook refuses to run what they did not see.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn


def _lists(model: nn.Module, called: set[str]) -> Iterable[tuple[str, list[bool], list[nn.Module]]]:
    """Every list of like modules of which some ran and some did not."""
    reached = {name[: i if i >= 0 else len(name)] for name in called for i in _prefixes(name)}
    for name, module in model.named_modules():
        children = list(module.children()) if isinstance(module, nn.ModuleList) else []
        flags = [f"{name}.{i}".lstrip(".") in reached for i in range(len(children))]
        if any(flags) and not all(flags) and len({type(c) for c in children}) == 1:
            yield name, flags, children


def _prefixes(name: str) -> list[int]:
    return [-1, *(i for i, c in enumerate(name) if c == ".")]


def unsure_weights(model: nn.Module, called: set[str]) -> dict[str, str]:
    """Parameters that must stay as they are because a sibling of their module was not reached, and why."""
    found: dict[str, str] = {}
    for name, flags, children in _lists(model, called):
        if flags == sorted(flags, reverse=True):
            continue
        missing = f"{name}.{flags.index(False)}".lstrip(".")
        for i, (flag, child) in enumerate(zip(flags, children, strict=True)):
            for parameter, _ in child.named_parameters() if flag else ():
                found[f"{name}.{i}.{parameter}".lstrip(".")] = f"no recorded batch reached {missing}, a sibling of its module"
    return found


def unseen_modules(model: nn.Module, called: set[str]) -> list[str]:
    """Names of the modules at the end of such lists."""
    return [
        f"{name}.{i}".lstrip(".")
        for name, flags, _ in _lists(model, called)
        for i, flag in enumerate(flags)
        if not flag and flags == sorted(flags, reverse=True)
    ]


def guard(model: nn.Module, names: Iterable[str]) -> None:
    """Make these modules refuse to run."""
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(functools.partial(_refuse, name))


def _refuse(name: str, module: nn.Module, args: Any) -> None:
    raise RuntimeError(
        f"{name} ran, but no batch that this model was quantized with reached it, so its weights do not fit the streams "
        "around it; quantize the original model with batches that reach it"
    )
