"""mmqc: a quantizing compiler for multimodal LLMs.

    mmqc.quantize_(model, mmqc.recipes.mquant(weight_bits=4), calibration=batches)
    model = torch.compile(model, backend="mmqc")

Names are loaded when they are first used, so that ``import mmqc`` costs little more than ``import torch``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mmqc.checkpoint import hf_hook
from mmqc.compiler import discovery

if TYPE_CHECKING:
    from mmqc import recipes, samples
    from mmqc.adapters.errors import AdapterError
    from mmqc.adapters.load import fold_adapter, load_adapter, unload_adapter
    from mmqc.checkpoint.load import load_quantized
    from mmqc.checkpoint.save import FormatError, save_pretrained
    from mmqc.compiler.compiled_loop import compiled_loop
    from mmqc.compiler.warm import WarmCall, warm
    from mmqc.config import ActivationSpec, ConfigError, KVSpec, QuantConfig, Rewrites, Scheme, WeightSpec
    from mmqc.errors import MmqcError
    from mmqc.explain import Explanation, explain
    from mmqc.export import export
    from mmqc.kv.cache import QuantizedCache
    from mmqc.kv.rounded import RoundedCache
    from mmqc.plan import Planned, plan
    from mmqc.quantization.equivalence import RewriteError
    from mmqc.quantization.progress import OutOfMemoryError
    from mmqc.quantization.resume import ResumeError
    from mmqc.quantize import quantize_
    from mmqc.report.report import LayerReport, QuantReport, Refusal

__version__ = "0.1.0.dev0"

_HOMES = {
    "quantize_": "quantize",
    "export": "export",
    "explain": "explain",
    "Explanation": "explain",
    "plan": "plan",
    "Planned": "plan",
    "compiled_loop": "compiler.compiled_loop",
    "warm": "compiler.warm",
    "WarmCall": "compiler.warm",
    "QuantizedCache": "kv.cache",
    "RoundedCache": "kv.rounded",
    "RewriteError": "quantization.equivalence",
    "ResumeError": "quantization.resume",
    "OutOfMemoryError": "quantization.progress",
    "MmqcError": "errors",
    "save_pretrained": "checkpoint.save",
    "FormatError": "checkpoint.save",
    "load_quantized": "checkpoint.load",
    "load_adapter": "adapters.load",
    "unload_adapter": "adapters.load",
    "fold_adapter": "adapters.load",
    "AdapterError": "adapters.errors",
    "QuantReport": "report.report",
    "LayerReport": "report.report",
    "Refusal": "report.report",
    **dict.fromkeys(("QuantConfig", "Rewrites", "Scheme"), "config"),
    **dict.fromkeys(("ActivationSpec", "ConfigError", "KVSpec", "WeightSpec"), "specs"),
}
_MODULES = ("recipes", "samples")

__all__ = [
    "ActivationSpec",
    "AdapterError",
    "ConfigError",
    "Explanation",
    "FormatError",
    "KVSpec",
    "LayerReport",
    "MmqcError",
    "OutOfMemoryError",
    "Planned",
    "QuantConfig",
    "QuantReport",
    "QuantizedCache",
    "Refusal",
    "ResumeError",
    "RewriteError",
    "Rewrites",
    "RoundedCache",
    "Scheme",
    "WarmCall",
    "WeightSpec",
    "compiled_loop",
    "explain",
    "export",
    "fold_adapter",
    "load_adapter",
    "load_quantized",
    "plan",
    "quantize_",
    "recipes",
    "samples",
    "save_pretrained",
    "unload_adapter",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        home = _HOMES[name]
        globals()[name] = found = getattr(importlib.import_module(f".{home}", __name__), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Where a module and a function share a name (``explain``, ``plan``, ``export``), the name is the function's."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, ModuleType):  # what importing a module would set
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
discovery.announce()
hf_hook.install()
