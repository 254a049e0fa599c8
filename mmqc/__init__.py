"""mmqc: a quantizing compiler for multimodal LLMs.

    mmqc.quantize_(model, mmqc.recipes.mquant(weight_bits=4), calibration=batches)
    model = torch.compile(model, backend="mmqc")

Names are loaded when they are first used, so that ``import mmqc`` costs little more than ``import torch``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import discovery, hf_hook

if TYPE_CHECKING:
    from . import recipes, samples
    from .cache import QuantizedCache
    from .cache_rounded import RoundedCache
    from .compiled_loop import compiled_loop
    from .config import ActivationSpec, ConfigError, KVSpec, QuantConfig, Rewrites, Scheme, WeightSpec
    from .equivalence import RewriteError
    from .explain import Explanation, explain
    from .export import export
    from .load_quantized import load_quantized
    from .memory_error import OutOfMemoryError
    from .plan import Planned, plan
    from .quantize import quantize_
    from .report import LayerReport, QuantReport, Refusal
    from .resume import ResumeError
    from .save import FormatError, save_pretrained

__version__ = "0.1.0.dev0"

_HOMES = {
    "quantize_": "quantize", "compiled_loop": "compiled_loop", "QuantizedCache": "cache", "RoundedCache": "cache_rounded",
    "explain": "explain", "Explanation": "explain", "export": "export",
    "plan": "plan", "Planned": "plan", "RewriteError": "equivalence", "ResumeError": "resume",
    "OutOfMemoryError": "memory_error",
    "save_pretrained": "save", "FormatError": "save", "load_quantized": "load_quantized",
    "QuantReport": "report", "LayerReport": "report", "Refusal": "report",
    **dict.fromkeys(("QuantConfig", "Rewrites", "Scheme"), "config"),
    **dict.fromkeys(("ActivationSpec", "ConfigError", "KVSpec", "WeightSpec"), "specs"),
}  # fmt: skip
_MODULES = ("recipes", "samples")

__all__ = [
    "ActivationSpec", "ConfigError", "Explanation", "FormatError", "KVSpec", "LayerReport", "OutOfMemoryError", "Planned",
    "QuantConfig", "QuantReport", "QuantizedCache", "Refusal", "ResumeError", "RewriteError", "Rewrites", "RoundedCache",
    "Scheme", "WeightSpec", "compiled_loop", "explain", "export", "load_quantized", "plan", "quantize_", "recipes", "samples",
    "save_pretrained",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        home = _HOMES[name]
        module = importlib.import_module(f".{home}", __name__)
        for public in (name, home):  # a module and a function may share a name (explain, plan): the function wins
            if _HOMES.get(public) == home:
                globals()[public] = getattr(module, public)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


discovery.announce()
hf_hook.install()
