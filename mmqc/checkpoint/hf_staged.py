"""What mmqc adds to transformers' own functions: a save in one step, and checkpoints that need mmqc.

Without mmqc transformers skips a quantization method that it does not know, with a warning, and loads random weights.
One that is not named it refuses, so config.json names none and says ``requires`` instead; here the name is put back.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from mmqc.checkpoint.staging import replacing, weight_files

METHOD = "mmqc"
REQUIRES = "mmqc: run `import mmqc` before transformers loads this model"


def with_method(settings: Any) -> Any:
    """The ``quantization_config`` of a config.json with the method that it stands for."""
    if isinstance(settings, Mapping) and not settings.get("quant_method") and str(settings.get("requires")).startswith(METHOD):
        return {**settings, "quant_method": METHOD}
    return settings


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
