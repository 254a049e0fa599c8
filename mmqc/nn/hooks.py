"""What users hung on a module: which modules somebody looks into, and how a module of ours takes over from the one it replaces.

A hook sees the input and the output of its module.  Where these are rewritten (rotated, scaled, without their mean) it would see
other numbers, so the analysis must take it for a reader of both.  Where they are the same, the hook is carried over.

Not users' hooks: those of mmqc, of torch (weight norm, pruning), of transformers (captured outputs) and of accelerate (placement).
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

OTHERS = ("mmqc.", "torch.", "transformers.", "accelerate.")
PLACED = "_hf_hook"  # accelerate replaces ``forward`` where it places a module
SEEING = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
SAVING = {
    "_state_dict_pre_hooks": "state-dict pre-hook",
    "_state_dict_hooks": "state-dict hook",
    "_load_state_dict_pre_hooks": "load-state-dict pre-hook",
    "_load_state_dict_post_hooks": "load-state-dict hook",
}
FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
PATCHED = "patched forward"


def hooked_modules(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """What users hung on the modules of ``model`` that sees their inputs or outputs, in words, by FQN.

    A module that is registered under several names is listed under each.  The model itself has the name "".  torch's global
    hooks are on every module.
    """
    everywhere = tuple(f"global {word}" for name, word in SEEING.items() if any(map(_users, _global(name).values())))
    found = {name: (*hooks_of(module), *everywhere) for name, module in model.named_modules(remove_duplicate=False)}
    return {name: words for name, words in found.items() if words}


def hooks_of(module: nn.Module) -> tuple[str, ...]:
    """What users hung on one module that sees its input or output, in words; children not counted."""
    words = [word for name, word in SEEING.items() if any(map(_users, getattr(module, name).values()))]
    return (*words, *((PATCHED,) if is_patched(module) else ()))


def is_patched(module: nn.Module) -> bool:
    """Whether ``module.forward = f`` replaced the forward of this instance."""
    forward = vars(module).get("_old_forward" if PLACED in vars(module) else "forward")
    own = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    return forward is not None and not own


def _users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return not (getattr(hook, "__module__", None) or "").startswith(OTHERS)


def _global(name: str) -> dict[int, Any]:
    return getattr(torch_module, f"_global{name}")
