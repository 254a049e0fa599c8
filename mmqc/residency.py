"""Where a model's modules are while it is quantized: as they are, or on an accelerator one block at a time.

With ``device=`` a model that lives in host memory computes on the accelerator: what is in no block (embeddings, norms, the
head) is moved there for the length of the call, and each block for the length of its forward.  Parameters keep their identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Residency:
    """The device that computes, and which blocks are on it now.

    Attributes:
        device: the accelerator, or the model's own device.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str] = (), device: Any = None) -> None:
        self.model, self.blocks = model, tuple(blocks)
        first = next(model.parameters(), None)
        home = first.device if first is not None else torch.device("cpu")
        self.device = home if device is None else torch.device(device)
        self.offloads = self.device != home
        self.home = home

    def __enter__(self) -> Residency:
        self.handles: list[Any] = []
        if not self.offloads:
            return self
        inside = {id(m) for name in self.blocks for m in self.model.get_submodule(name).modules()}
        self.outer = [m for m in self.model.modules() if id(m) not in inside]
        for module in self.outer:
            _move(module, self.device)
        for name in self.blocks:
            block = self.model.get_submodule(name)
            self.handles.append(block.register_forward_pre_hook(self._enter, prepend=True))
            self.handles.append(block.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        if self.offloads:
            for module in self.model.modules():
                _move(module, self.home)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._to(module, self.device)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self.held:
            self._to(module, self.home)

    held: nn.Module | None = None

    @contextmanager
    def resident(self, name: str) -> Iterator[None]:
        """Keep one block on the device, whatever replaces its modules meanwhile."""
        self.held = self.model.get_submodule(name)
        try:
            if self.offloads:
                self._to(self.held, self.device)
            yield
        finally:
            block, self.held = self.held, None
            if self.offloads and block is not None:
                self._to(block, self.home)

    def _to(self, block: nn.Module, device: torch.device) -> None:
        for module in block.modules():
            _move(module, device)

    def batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch on the device that computes."""
        if not self.offloads:
            return batch
        return pytree.tree_map(lambda v: v.to(self.device) if isinstance(v, Tensor) else v, batch)


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module's own tensors; no mode that records torch calls sees it."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
