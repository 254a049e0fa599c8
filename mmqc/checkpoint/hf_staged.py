"""What mmqc adds to transformers' own functions: a save in one step, and checkpoints that need mmqc."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from mmqc.checkpoint.method_name import with_method
from mmqc.checkpoint.staging import replacing, weight_files


def _named(function: Callable[..., Any]) -> staticmethod[..., Any]:
    @functools.wraps(function)
    def call(settings: Any, *args: Any, **kwargs: Any) -> Any:
        return function(with_method(settings), *args, **kwargs)

    return staticmethod(call)


def staged(save: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``save_pretrained``, which replaces the directory in one step if the model is one of mmqc's."""
    names = list(inspect.signature(save).parameters)[2:]  # behind self and save_directory

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        method = getattr(getattr(self, "hf_quantizer", None), "stages_saves", False)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        kwargs |= dict(zip(names, args, strict=False))
        if method:
            quantizer: Any = self.hf_quantizer
            kwargs["save_original_format"] = quantizer.renames(self, kwargs.get("save_original_format", True))
        if not method or distributed or not kwargs.get("is_main_process", True):
            return save(self, save_directory, **kwargs)
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", Path(save_directory).name)
        with replacing(save_directory, weight_files(kwargs.get("variant"))) as stage:
            done = save(self, stage, **kwargs)
            self.hf_quantizer.seal(stage)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue, reportAttributeAccessIssue]
            return done

    return save_pretrained


PreTrainedModel.save_pretrained = staged(PreTrainedModel.save_pretrained)  # pyright: ignore[reportAttributeAccessIssue]
AutoHfQuantizer.supports_quant_method = _named(AutoHfQuantizer.supports_quant_method)
AutoQuantizationConfig.from_dict = _named(AutoQuantizationConfig.from_dict)  # pyright: ignore[reportAttributeAccessIssue]
