"""What mmqc adds to transformers' reading and writing of JSON: a config.json of mmqc's is signed, and checked when it is read.

The file is checked as it lies on the disk, before overrides: what a caller passes to ``from_pretrained`` is the caller's wish.
Likewise what transformers writes is meant: ``config.save_pretrained`` and ``generation_config.save_pretrained`` sign again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from mmqc.checkpoint.files import CONFIG, read_json
from mmqc.checkpoint.sign import sign_config
from mmqc.checkpoint.signature import check_config, is_signed


def _checked(read: Callable[..., Any]) -> classmethod[Any, ..., Any]:
    @functools.wraps(read)
    def _dict_from_json_file(cls: type[PreTrainedConfig], json_file: str | os.PathLike[str]) -> Any:
        found = read(cls, json_file)
        if isinstance(found, dict) and any(isinstance(value, dict) for value in found.values()):
            path = Path(json_file)
            check_config(read_json(path), path)  # again from the file: transformers decodes special floats
        return found

    return classmethod(_dict_from_json_file)


def signing(write: Callable[..., Any], name: str) -> Callable[..., Any]:
    """transformers' ``to_json_file``, after which the config.json beside the file called ``name`` is signed again."""

    @functools.wraps(write)
    def to_json_file(self: Any, json_file_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        done = write(self, json_file_path, *args, **kwargs)
        path = Path(json_file_path)
        if path.name == name and path.with_name(CONFIG).exists():
            raw = read_json(path.with_name(CONFIG))
            if is_signed(raw):
                sign_config(path.parent, raw)
        return done

    return to_json_file


setattr(PreTrainedConfig, "_dict_from_json_file", _checked(PreTrainedConfig._dict_from_json_file.__func__))  # noqa: B010
PreTrainedConfig.to_json_file = signing(PreTrainedConfig.to_json_file, CONFIG)  # pyright: ignore[reportAttributeAccessIssue]
