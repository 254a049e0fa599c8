"""Torch as it is where nobody has changed it, for what works on a model's weights whatever surrounds the call.

Solvers that add up in autocast's bfloat16 find other weights, and what was made in inference mode cannot be written to outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def ordinary() -> Iterator[None]:
    """No inference mode, no autocast, and new tensors on the CPU unless said otherwise; a context or a decorator."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def with_ordinary_tensors(model: nn.Module) -> nn.Module:
    """The model itself, with copies of its tensors that were made in inference mode; tied ones stay tied."""
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor: its id is another's once it is gone

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copy = tensor.detach().clone()
            copies[id(tensor)] = tensor, nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
        return copies[id(tensor)][1]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_inference():
                    tensors[name] = copied(tensor)  # type: ignore[assignment]
    return model
