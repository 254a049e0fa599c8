"""Asks an installed vLLM, on whatever machine, what it would do with a linear on a given GPU: scheme, kernel, or refusal.

    python -m mmqc.engines.ask_vllm < questions.json > answers.json

    question    {"config": quantization_config, "inputs": K, "outputs": N}, on capability 90 and with linear backend "auto"
    answer      {"scheme": class, "kernel": class, "note": ..., "tensors": names that it loads}  or  {"refused": error}

vLLM's own Python answers: its config classes read the config, its own linear creates the weights, its own tables choose the kernel.
Only what the compiled library and the GPU would say is put in their place: the device's capability, that CUTLASS's float8 products
are there from 8.9 on, and that Humming and FlashInfer, which vLLM's wheel requires, are installed.  Formats in 4-bit floats need
more of the GPU than that and are not asked.

vLLM is patched for good, so it is asked in a process of its own (engines/table.py).
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.machinery
import inspect
import io
import json
import logging
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any, cast

IMPORTED_AS_ON_A_CPU = (
    "kernels.linear",
    "layers.linear",
    "layers.quantization.auto_awq",
    "layers.quantization.auto_gptq",
    "layers.quantization.compressed_tensors.compressed_tensors",
)
DTYPE = "bfloat16"  # of activations, which CUTLASS's 4-bit kernel wants


class _Anything(types.ModuleType):
    """A module that has whatever is imported from it."""

    __path__ = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder:
    """Finds everything below a package of that name."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """A spec of a module that has anything, for names in the package."""
        inside = name == self.package or name.startswith(f"{self.package}.")
        return importlib.machinery.ModuleSpec(name, cast(Any, self), is_package=True) if inside else None

    def create_module(self, spec: Any) -> Any:
        """That module."""
        return _Anything(spec.name)

    def exec_module(self, module: Any) -> None:
        """It has no code."""


def load(importing: Any) -> Any:
    """What it returns once packages that are not here have stand-ins: a class is read, and no model of it is built."""
    while True:
        try:
            return importing()
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in ("", "vllm", "mmqc") or any(isinstance(f, _Finder) and f.package == missing for f in sys.meta_path):
                raise
            sys.meta_path.append(_Finder(missing))  # type: ignore[arg-type]


def prepare(capability: int) -> None:
    """From here on vLLM takes this machine for one with an NVIDIA GPU of ``capability`` (90: Hopper)."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    logging.disable(logging.WARNING)
    for name in IMPORTED_AS_ON_A_CPU:
        importlib.import_module(f"vllm.model_executor.{name}")
    one_rank()
    import vllm.platforms as platforms
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    def value(of: Any) -> int:
        return of if isinstance(of, int) else of[0] * 10 + of[1]

    platform: Any = type(platforms.current_platform)
    platform._enum = PlatformEnum.CUDA
    platform.is_cuda = lambda self: True
    platform.is_cuda_alike = lambda self: True
    platform.is_cpu = lambda self: False
    platform.is_rocm = lambda self: False
    platform.get_device_capability = classmethod(lambda cls, *a, **k: DeviceCapability(capability // 10, capability % 10))
    platform.is_device_capability = classmethod(lambda cls, c, *a, **k: value(c) == capability)
    platform.has_device_capability = classmethod(lambda cls, c, *a, **k: value(c) <= capability)
    from vllm import _custom_ops as ops

    ops.cutlass_scaled_mm_supports_fp8 = lambda c: c >= 89
    ops.cutlass_scaled_mm_supports_block_fp8 = lambda c: c >= 90
    from vllm.model_executor.kernels.linear.mixed_precision import humming
    from vllm.utils import import_utils

    for module in (humming, import_utils):
        for name in ("has_humming", "has_flashinfer"):
            if hasattr(module, name):
                setattr(module, name, lambda: True)


def one_rank() -> None:
    """The process groups that parallel linears look for, of this process alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1)


@contextlib.contextmanager
def configured(backend: str) -> Iterator[None]:
    """Within it layers can be built, for one rank, with ``--linear-backend`` as given."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config

    config: Any = VllmConfig()
    config.kernel_config.linear_backend = backend
    config.model_config = types.SimpleNamespace(dtype=getattr(torch, DTYPE), quantization_config=None)  # all that linears ask
    with set_current_vllm_config(config):
        yield


def quantization(config: dict[str, Any]) -> Any:
    """The engine's config object of a checkpoint's ``quantization_config``."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    method = {"awq": "auto_awq", "gptq": "auto_gptq"}.get(config["quant_method"], config["quant_method"])
    cls: Any = get_quantization_config(method)
    made = cls.from_config(copy.deepcopy(config))
    if hasattr(made, "modules_in_block_to_quantize"):
        made.modules_in_block_to_quantize = ["layer"]
    return made


def kernel_of(layer: Any) -> Any:
    """The kernel that a built layer calls; None of a method that has none."""
    from vllm.model_executor.kernels.linear import MPLinearKernel
    from vllm.model_executor.kernels.linear.base import MMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import ScaledMMLinearKernel

    for owner in (getattr(layer, "scheme", None), layer.quant_method):
        for value in vars(owner).values() if owner is not None else ():
            if isinstance(value, MPLinearKernel | MMLinearKernel | ScaledMMLinearKernel):
                return value
    return None


def note_on(layer: Any, kernel: Any, scheme: str, question: dict[str, Any]) -> str:
    """Says "float inputs": quantized ones are asked for, and left in floating point; "triton": these widths are not CUTLASS's."""
    asked = any((g or {}).get("input_activations") for g in question["config"].get("config_groups", {}).values())
    if asked and (scheme.endswith("A16Fp8") or _mixed_with_floats(layer, kernel)):
        return "float inputs"
    unaligned = question["inputs"] % 16 or question["outputs"] % 16
    if unaligned and type(kernel).__name__.startswith("CutlassInt8"):
        return "triton" if _triton(question["inputs"], question["outputs"]) else "fails"
    return ""


def _mixed_with_floats(layer: Any, kernel: Any) -> bool:
    """Whether a kernel of weights in few bits is given inputs in floating point, and has no other word of their codes."""
    from vllm.model_executor.kernels.linear import MPLinearKernel

    if not isinstance(kernel, MPLinearKernel) or kernel.config.act_type.itemsize == 1:
        return False
    told = "_humming_input_quant_config"  # which a layer carries for the kernels that look at it
    return not (hasattr(layer, told) and told in inspect.getsource(sys.modules[type(kernel).__module__]))


def _triton(inputs: int, outputs: int) -> bool:
    """Whether the engine's own function hands a product of such widths to Triton."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.compressed_tensors import triton_scaled_mm as module

    called = []
    own, module.triton_scaled_mm = module.triton_scaled_mm, lambda *a, **k: called.append(a) or a[0]
    x, w = torch.empty(16, inputs, dtype=torch.int8), torch.empty(inputs, outputs, dtype=torch.int8)
    with contextlib.suppress(Exception):
        ops.cutlass_scaled_mm(x, w, torch.ones(1), torch.ones(1), torch.bfloat16)
    module.triton_scaled_mm = own
    return bool(called)


def answer(question: dict[str, Any]) -> dict[str, str]:
    """What becomes of one linear."""
    import torch
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    try:
        config = quantization(question["config"])
        with torch.device("meta"):
            layer: Any = ReplicatedLinear(
                question["inputs"],
                question["outputs"],
                bias=False,
                params_dtype=getattr(torch, DTYPE),
                quant_config=config,
                prefix="layer",
            )
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    if isinstance(layer.quant_method, UnquantizedLinearMethod):
        return {"scheme": "none", "kernel": "none", "note": "", "tensors": "weight"}
    kernel = kernel_of(layer)
    scheme = type(getattr(layer, "scheme", None) or layer.quant_method).__name__
    return {
        "scheme": scheme,
        "kernel": type(kernel).__name__ if kernel else scheme,
        "note": note_on(layer, kernel, scheme, question),
        "tensors": " ".join(sorted(name for name, value in layer._parameters.items() if value is not None)),
    }


def model_names(architecture: str) -> dict[str, Any] | None:
    """How a model class renames a checkpoint's modules and joins them; None of one that this vLLM has not."""
    from vllm.model_executor.models import ModelRegistry

    found: Any = ModelRegistry.models.get(architecture)
    if found is None:
        return None
    cls = load(found.load_model_cls)
    mapper = getattr(cls, "hf_to_vllm_mapper", None)
    renaming: dict[str, Any] = {}
    if mapper is not None:
        mapper = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
        renaming = {
            "regex": [[p.pattern, to] for p, to in getattr(mapper, "orig_to_new_regex", {}).items() if to is not None],
            **{
                kind: [[a, b] for a, b in getattr(mapper, f"orig_to_new_{kind}").items() if b is not None]
                for kind in ("substr", "prefix", "suffix")
            },
        }
    return {"joined": {k: list(v) for k, v in getattr(cls, "packed_modules_mapping", {}).items()}, "renaming": renaming}


def main() -> None:
    """Questions on stdin, answers on stdout, in the same order."""
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        prepare(asked.get("capability", 90))
        with configured(asked.get("backend", "auto")):
            answers = [answer(question) for question in asked.get("questions", ())]
        models = {name: model_names(name) for name in asked.get("models", ())}
        import vllm
    json.dump({"version": vllm.__version__, "answers": answers, "models": models}, sys.stdout)


if __name__ == "__main__":
    main()
