"""Where a model's modules are while it is quantized: as they are, or on an accelerator one block at a time.

With ``device=`` a model that lives in host memory computes on the accelerator: what is in no block (embeddings, norms, the
head) is moved there for the length of the call, and each block for the length of its forward.  Parameters keep their identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from mmqc.nn.online_hadamard import OnlineHadamard


@dataclass(frozen=True)
class Left:
    """Where a tensor was: ``tensor`` is the one that a module has now, ``data`` its data before it was moved.

    ``memory`` tells the data since, and does not keep it: what is replaced meanwhile leaves the device.
    """

    tensor: Tensor
    data: Tensor
    memory: StorageWeakRef

    @classmethod
    def of(cls, tensor: Tensor, data: Tensor) -> Left:
        """``tensor`` has been moved."""
        return cls(tensor, data, StorageWeakRef(tensor.untyped_storage()))

    def unchanged(self, tensor: Tensor) -> bool:
        """Whether it is this tensor, and no other data was put into it."""
        alike = (tensor.shape, tensor.stride()) == (self.data.shape, self.data.stride())
        return self.tensor is tensor and alike and StorageWeakRef(tensor.untyped_storage()) == self.memory


Moved = dict[int, Left]  # by identity of the tensor


class Residency:
    """The device that computes, and which blocks are on it now.

    Attributes:
        device: the accelerator, or the model's own device.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str] = (), device: Any = None) -> None:
        self.model, self.blocks = model, tuple(blocks)
        first = next(model.parameters(), None)
        home = first.device if first is not None else torch.device("cpu")
        self.device = home if device is None else torch.empty(0, device=device).device  # "cuda" is "cuda:0", say
        self.offloads = self.device != home
        self.home = home
        self.held: nn.Module | None = None
        self.kept: dict[int, Moved] = {}  # by block
        self.outer: Moved = {}  # of what is in no block

    def __enter__(self) -> Residency:
        self.handles: list[Any] = []
        if not self.offloads:
            return self
        inside = {id(m) for name in self.blocks for m in self.model.get_submodule(name).modules()}
        try:
            for module in [m for m in self.model.modules() if id(m) not in inside]:
                self.outer |= _move(module, self.device)
        except BaseException:
            self.__exit__()
            raise
        for name in self.blocks:
            block = self.model.get_submodule(name)
            self.handles.append(block.register_forward_pre_hook(self._enter, prepend=True))
            self.handles.append(block.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        if self.offloads:
            kept, self.outer = self.outer, {}
            for module in self.model.modules():
                _move(module, self.home, kept)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._bring(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self.held:
            self._take_back(module)

    @contextmanager
    def resident(self, name: str) -> Iterator[None]:
        """Keep one block on the device, whatever replaces its modules meanwhile."""
        if not self.offloads:
            yield
            return
        self.held = block = self.model.get_submodule(name)
        try:
            self._bring(block)
            yield
        finally:
            self.held = None
            self._take_back(block)

    def around(self, name: str) -> AbstractContextManager[None]:
        """``resident`` for the block that a module is in; nothing to do for one that is in none."""
        block = next((b for b in self.blocks if f"{name}.".startswith(f"{b}.")), None)
        return nullcontext() if block is None else self.resident(block)

    def _bring(self, block: nn.Module) -> None:
        if id(block) not in self.kept:
            self.kept[id(block)] = {}  # before the first move: a failure in the middle can be taken back
            for module in block.modules():
                self.kept[id(block)] |= _move(module, self.device)

    def _take_back(self, block: nn.Module) -> None:
        kept = self.kept.pop(id(block), {})
        for module in block.modules():
            _move(module, self.home, kept)

    def batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch on the device that computes."""
        return pytree.tree_map(lambda v: v.to(self.device) if isinstance(v, Tensor) else v, batch)


def _move(module: nn.Module, device: torch.device, kept: Moved | None = None) -> Moved:
    """Move a module's own tensors; no mode that records torch calls sees it.

    Returns:
        What was moved.  Given back as ``kept`` it saves the copy on the way home, where nothing has changed.
    """
    before: Moved = {}
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or tensor.device == device:
                continue
            left = (kept or {}).get(id(tensor))
            moved = left.data if left is not None and left.unchanged(tensor) else tensor.data.to(device)
            # a recording knows tensors by identity; the factors of Hadamards are shared with other models
            if not isinstance(module, OnlineHadamard) or isinstance(tensor, nn.Parameter):
                old, tensor.data = tensor.data, moved
                before[id(tensor)] = Left.of(tensor, old)
            else:
                module._buffers[name] = moved
                before[id(moved)] = Left.of(moved, tensor)
    return before
