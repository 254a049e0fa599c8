"""Modules that ``generate`` calls by themselves, past the model: those that are given token ids have the mask of these ids.

DiffusionGemma's encoder reads the prompt, and later every block of the answer, whose rows are not the prompt's.  What is given
embeddings instead (the language models of BLIP-2) has the prompt's rows, see ``ModalityContext.generating``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from mmqc.traced import is_traced

IDS = "input_ids"


class Told(Protocol):
    """What a ``ModalityContext`` is here."""

    text_only: bool

    @property
    def running(self) -> bool:
        """Whether the model is."""
        ...

    def begin_by_itself(self, module: nn.Module, ids: Tensor) -> None:
        """A part of the model is."""

    def end_by_itself(self, module: nn.Module) -> None:
        """It has ended, if it was this one."""


class InnerCalls:
    """The hooks of the modules inside a model that carries a context; within a call of the model they do nothing."""

    def __init__(self, context: Told) -> None:
        self.context = context

    def attach(self, model: nn.Module) -> None:
        """Hooks on every module inside that takes token ids and has others in it."""
        for module in list(model.modules())[1:]:
            if any(True for _ in module.children()) and IDS in inspect.signature(module.forward).parameters:
                module.register_forward_pre_hook(self.begin, with_kwargs=True)
                module.register_forward_hook(self.end, always_call=True)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Forward pre-hook."""
        if is_traced() or self.context.running or self.context.text_only:
            return
        ids = kwargs.get(IDS, args[0] if args else None)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or _reads_others(kwargs):
            return
        self.context.begin_by_itself(module, ids)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook."""
        del args, output
        if not is_traced():
            self.context.end_by_itself(module)


def _reads_others(kwargs: Mapping[str, Any]) -> bool:
    """Whether linears inside have rows of something else than the ids, too: an encoder's states, or embeddings."""
    return any(v is not None for k, v in kwargs.items() if k.startswith("encoder_") or k == "inputs_embeds")
