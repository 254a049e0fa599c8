"""The name of mmqc's quantization method, which config.json does not say.

Without mmqc transformers skips a quantization method that it does not know, with a warning, and loads random weights.
One that is not named it refuses, so config.json names none and says ``requires`` instead; here the name is put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHOD = "mmqc"
REQUIRES = "mmqc: run `import mmqc` before transformers loads this model"


def with_method(settings: Any) -> Any:
    """The ``quantization_config`` of a config.json with the method that it stands for."""
    if isinstance(settings, Mapping) and not settings.get("quant_method") and str(settings.get("requires")).startswith(METHOD):
        return {**settings, "quant_method": METHOD}
    return settings
