"""For programs that read config.json through transformers and look for a method's name in it, as vLLM does: the name is put back.

The file itself names none (mmqc/checkpoint/method_name.py says why), so this is for processes that load no model by transformers.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from mmqc.checkpoint.method_name import with_method
from mmqc.checkpoint.signature import KEY


def name_methods() -> None:
    """From here on a config.json of mmqc's says so when it is read, in this process; a second call does nothing."""
    read = PreTrainedConfig._dict_from_json_file.__func__  # pyright: ignore[reportFunctionMemberAccess]
    if hasattr(read, "names_methods"):
        return

    @functools.wraps(read)
    def _dict_from_json_file(cls: type[PreTrainedConfig], json_file: str | os.PathLike[str]) -> Any:
        found = read(cls, json_file)
        return {**found, KEY: with_method(found[KEY])} if isinstance(found, dict) and KEY in found else found

    vars(_dict_from_json_file)["names_methods"] = True
    setattr(PreTrainedConfig, "_dict_from_json_file", classmethod(_dict_from_json_file))  # noqa: B010
