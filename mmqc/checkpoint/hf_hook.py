"""Registers mmqc's quantizer with transformers, without importing transformers.

``from_pretrained`` of a model that mmqc saved must work after a plain ``import mmqc``, but importing transformers costs
seconds that most uses of mmqc do not need.  So if transformers' models are there already, the quantizer is registered
at once; otherwise a finder waits in ``sys.meta_path`` for the one module that ``from_pretrained`` lives in, lets the
ordinary import machinery load it, registers right after it ran, and is gone.  It never answers for any other module.
A second one waits likewise for the module that reads config.json, which is checked there: the first ``from_pretrained`` of
a process reads it before it imports any model.
A third one waits for ``peft``'s LoRA, to which mmqc's linears are made known.
(The table of quantizers itself, ``transformers.quantizers.auto``, is loaded halfway through that module, when nothing
that a quantizer needs can be imported yet.)
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TARGETS = {
    "transformers.configuration_utils": "mmqc.checkpoint.hf_signed",
    "transformers.modeling_utils": "mmqc.checkpoint.hf",
    "peft.tuners.lora.model": "mmqc.adapters.peft_layers",
}  # what to import once a module of theirs is there


class _RegisterAfterImport(MetaPathFinder):
    """Finds ``target`` the way everybody else does, with one more step after it has run."""

    def __init__(self, target: str) -> None:
        self.target = target

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.target:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _after(spec, fullname)
        return spec


def _after(spec: ModuleSpec, target: str) -> None:
    loader = spec.loader
    assert loader is not None
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # the loader stays the genuine one: whoever asks it for source or file name later gets the usual answer
        del loader.exec_module
        try:
            run(module)
        except BaseException:
            install()
            raise
        register(target)

    loader.exec_module = exec_module


def register(target: str) -> None:
    """Puts the quantizer and its config into transformers' tables, or the check in front of its reader: by importing them."""
    importlib.import_module(TARGETS[target])


def install() -> None:
    """Registers now what transformers has imported, the rest once it is; may be called again."""
    waiting = {finder.target for finder in sys.meta_path if isinstance(finder, _RegisterAfterImport)}
    for target in TARGETS:
        if target in sys.modules:
            register(target)
        elif target not in waiting:
            sys.meta_path.insert(0, _RegisterAfterImport(target))
