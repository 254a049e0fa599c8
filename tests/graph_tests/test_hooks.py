import functools

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

from mmqc.graph.hooks import hooked_modules
from mmqc.nn.modality import ModalityContext
from mmqc.nn.unseen import guard


def seen(*args, **kwargs):
    """A hook that reads."""


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))


def test_hooks__each_kind_is_named_with_its_module() -> None:
    m = model()
    m[0].register_forward_pre_hook(seen, with_kwargs=True, prepend=True)
    m[0].register_full_backward_hook(seen)
    m[1].register_forward_hook(functools.partial(seen, 1), always_call=True)
    m[1][1].register_full_backward_pre_hook(lambda module, grads: None)
    m[1][0].forward = lambda x: x
    assert hooked_modules(m) == {
        "0": ("forward pre-hook", "backward hook"),
        "1": ("forward hook",),
        "1.0": ("patched forward",),
        "1.1": ("backward pre-hook",),
    }


def test_hooks__module_at_two_names_is_under_both() -> None:
    m = model()
    m.add_module("again", m[0])
    m[0].register_forward_hook(seen)
    assert set(hooked_modules(m)) == {"0", "again"}


def test_hooks__global_hook_is_on_every_module() -> None:
    handle = register_module_forward_hook(seen)
    try:
        assert set(hooked_modules(model())) == {"", "0", "1", "1.0", "1.1"}
    finally:
        handle.remove()
    assert hooked_modules(model()) == {}


def test_hooks__those_of_libraries_and_of_mmqc_are_no_users_hooks() -> None:
    m = model()
    ModalityContext.attach(m, ())
    guard(m, ["1"])
    prune.l1_unstructured(m[0], "weight", 0.5)
    add_hook_to_module(m[1][0], AlignDevicesHook(execution_device="cpu"))
    assert hooked_modules(m) == {}


@pytest.mark.parametrize("first", [True, False])
def test_hooks__patched_forward_is_seen_behind_accelerates(first: bool) -> None:
    m = model()
    if first:
        m[0].forward = functools.partial(torch.mul, 2)
    add_hook_to_module(m[0], AlignDevicesHook(execution_device="cpu"))
    assert hooked_modules(m) == ({"0": ("patched forward",)} if first else {})
