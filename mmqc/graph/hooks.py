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

OTHERS = ("mmqc.", "torch.", "transformers.", "accelerate.", "compressed_tensors.")
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
OURS = ("forward", "_old_forward", "_compiled_call_impl", PLACED)  # say how ``old`` itself is called


def hooked_modules(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """What users hung on the modules of ``model`` that sees their inputs or outputs, in words, by FQN.

    A module that is registered under several names is listed under each.  The model itself has the name "".  torch's global
    hooks are on every module.
    """
    found = {name: (*hooks_of(module), *global_hooks()) for name, module in model.named_modules(remove_duplicate=False)}
    return {name: words for name, words in found.items() if words}


def global_hooks() -> tuple[str, ...]:
    """What users hung on all modules of all models, in words."""
    return tuple(f"global {word}" for name, word in SEEING.items() if any(map(by_user, _global(name).values())))


def hooks_of(module: nn.Module) -> tuple[str, ...]:
    """What users hung on one module that sees its input or output, in words; children not counted."""
    words = [word for name, word in SEEING.items() if any(map(by_user, getattr(module, name).values()))]
    return (*words, *((PATCHED,) if is_patched(module) else ()))


def own_forward(module: nn.Module) -> Any:
    """What ``module.forward = f`` put in the place of the class's forward, accelerate's wrapper apart; None if nothing did."""
    forward = vars(module).get("_old_forward" if PLACED in vars(module) else "forward")
    own = getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward
    return None if own else forward


def is_patched(module: nn.Module) -> bool:
    """Whether a user replaced the forward of this instance."""
    forward = own_forward(module)
    return forward is not None and by_user(forward)


def saves(module: nn.Module) -> str:
    """A hook of a user's on the state dict, in words; nothing if there is none."""
    return next((word for name, word in SAVING.items() if any(map(by_user, getattr(module, name).values()))), "")


def by_user(hook: Any) -> bool:
    """Whether a hook, or a forward, is none of a library's and none of ours."""
    hook = getattr(hook, "hook", hook)  # torch wraps those that load a state dict
    while isinstance(hook, functools.partial):
        hook = hook.func
    return not (getattr(hook, "__module__", None) or "").startswith(OTHERS)


def _global(name: str) -> dict[int, Any]:
    return getattr(torch_module, f"_global{name}")


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Let ``new``, which takes the place of ``old``, have its hooks and the attributes that ``new`` does not have itself.

    Both share the hooks' tables, so that a handle that was given out for ``old`` removes the hook of ``new``.
    """
    for name in (*SEEING, *FLAGS):
        if getattr(old, name):
            object.__setattr__(new, name, getattr(old, name))
    object.__setattr__(new, "_is_full_backward_hook", old._is_full_backward_hook)
    taken = {*vars(new), *new._parameters, *new._buffers, *new._modules, *OURS}
    for name, value in vars(old).items():
        if name not in taken and not hasattr(type(new), name):
            object.__setattr__(new, name, value)
    if (placed := vars(old).get(PLACED)) is not None:
        from accelerate.hooks import add_hook_to_module  # whoever placed the model has it

        add_hook_to_module(new, placed)
