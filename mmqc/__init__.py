"""mmqc: a quantizing compiler for multimodal LLMs.

    mmqc.quantize_(model, mmqc.recipes.mquant(weight_bits=4), calibration=batches)
    model = torch.compile(model, backend="mmqc")

Names are loaded when they are first used, so that ``import mmqc`` costs little more than ``import torch``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mmqc.checkpoint import hf_hook
from mmqc.compiler import discovery

if TYPE_CHECKING:
    from mmqc import recipes, samples
    from mmqc.checkpoint.load import load_quantized
    from mmqc.checkpoint.save import FormatError, save_pretrained
    from mmqc.compiler.compiled_loop import compiled_loop
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
    "QuantizedCache": "kv.cache",
    "RoundedCache": "kv.rounded",
    "RewriteError": "quantization.equivalence",
    "ResumeError": "quantization.resume",
    "OutOfMemoryError": "quantization.progress",
    "MmqcError": "errors",
    "save_pretrained": "checkpoint.save",
    "FormatError": "checkpoint.save",
    "load_quantized": "checkpoint.load",
    "QuantReport": "report.report",
    "LayerReport": "report.report",
    "Refusal": "report.report",
    **dict.fromkeys(("QuantConfig", "Rewrites", "Scheme"), "config"),
    **dict.fromkeys(("ActivationSpec", "ConfigError", "KVSpec", "WeightSpec"), "specs"),
}
_MODULES = ("recipes", "samples")

__all__ = [
    "ActivationSpec",
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
    "WeightSpec",
    "compiled_loop",
    "explain",
    "export",
    "load_quantized",
    "plan",
    "quantize_",
    "recipes",
    "samples",
    "save_pretrained",
]


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
