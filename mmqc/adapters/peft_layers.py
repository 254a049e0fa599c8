"""``peft``'s LoRA on mmqc's linears: imported, and so registered, once ``peft.tuners.lora.model`` is (checkpoint/hf_hook.py).

    y = L(x) + s B (A x)        L: codes that stay as they are; its gradient for x is that of ops/straight_through.py

Shapes:  x [..., K]   A [r, K]   B [N, r]   y [..., N]   A reads the module's input: in front of an online Hadamard, unrounded

peft chooses its layer by the class of the module that it wraps, and "all-linear" by ``nn.Linear``: both know ours from here on.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners import tuners_utils  # pyright: ignore[reportMissingImports]
from peft.tuners.lora import model as lora_model  # pyright: ignore[reportMissingImports]
from peft.tuners.lora.layer import Linear  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from mmqc.adapters.errors import AdapterError
from mmqc.checkpoint.linear_like import NotLinearError, read_linear
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import HadamardLinear

OURS = (PackedLinear, HadamardLinear)
STARTS = (True, False, "gaussian", "orthogonal", "eva")  # of A and B; all others change the base weight


class LoraHadamardLinear(Linear):
    """On a float linear behind an online Hadamard: y = (W Hᵀ) (H x) + s B (A x); merging adds s B A Hᵀ."""

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As peft's.

        Raises:
            AdapterError: an initialisation that would change the base weight.
        """
        config = kwargs.get("config", args[2] if len(args) > 2 else None)
        start = getattr(config, "init_lora_weights", True)
        if start not in STARTS:
            raise AdapterError(
                f"init_lora_weights = {start!r} changes the weight under the adapter, which {type(self.get_base_layer()).__name__} "
                f"stores otherwise: take one of {', '.join(map(repr, STARTS))}"
            )
        super().update_layer(adapter_name, *args, **kwargs)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """LoRA as it is: variants read the base weight, or replace the product."""
        return {(): None}

    def get_delta_weight(self, adapter: str) -> Tensor:
        """S B A Hᵀ [N, K], for ``merge``."""
        base = self.get_base_layer()
        assert isinstance(base, HadamardLinear)
        return base.rotated(super().get_delta_weight(adapter))

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, OURS)
        return module.in_features, module.out_features


class LoraQuantLinear(LoraHadamardLinear):
    """On a linear with an integer weight."""

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[torch.device, torch.dtype]:
        return base_layer.qweight.device, base_layer.float_dtype  # peft would write out the weight to ask it

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused.

        Raises:
            AdapterError: always.
        """
        del safe_merge, adapter_names
        raise AdapterError(
            f"an adapter cannot be merged into the codes of {self.get_base_layer()}: rounding would lose it; merge it into the "
            "float model before quantize_ (mmqc.load_adapter(model, directory, merge=True)), or keep it beside the model"
        )


def dispatch(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module | None:
    """peft's last dispatcher, and ours in front of it."""
    linear: Any = target
    if isinstance(target, tuners_utils.BaseTunerLayer):
        linear = linear.get_base_layer()
    if not isinstance(linear, OURS) or kwargs.get("parameter_name") is not None:
        return _default(target, adapter_name, config=config, **kwargs)
    layer = LoraQuantLinear if isinstance(linear, PackedLinear) else LoraHadamardLinear
    return layer(target, adapter_name, config=config, **kwargs)


def include_all_linear(peft_config: Any, model: nn.Module) -> Any:
    """peft's meaning of "all-linear", with ours among them; the head, and what lies in an adapter, stay out as for peft.

    So does a subclass of ``nn.Linear`` in a model with ours that computes something else: peft adds to what it returns.
    """
    asked = getattr(peft_config, "target_modules", None)
    if not isinstance(asked, str) or asked.lower() != "all-linear" or getattr(peft_config, "peft_type", None) != "LORA":
        return _include(peft_config, model)
    peft_config = _include(peft_config, model)
    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    modules = dict(model.named_modules())
    if any(isinstance(module, OURS) for module in modules.values()):
        others = {name: why for name in peft_config.target_modules if (why := _why_not(modules.get(name)))}
        for name, why in others.items():
            warnings.warn(f"no adapter for {name}, a {type(modules[name]).__name__}: {why}", stacklevel=2)
        peft_config.target_modules = set(peft_config.target_modules) - set(others)
    wrapped = [f"{name}." for name, module in model.named_modules() if isinstance(module, tuners_utils.BaseTunerLayer)]
    peft_config.target_modules = set(peft_config.target_modules) | {
        name
        for name, module in model.named_modules()
        if isinstance(module, OURS) and module is not head and not name.startswith(tuple(wrapped))
    }
    return peft_config


def _why_not(module: nn.Module | None) -> str:
    """Why a linear with a forward of its own is none, e.g. Llama4's router, which returns a pair; "" for all others."""
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward or isinstance(module, OURS):
        return ""
    try:
        read_linear(module)
    except NotLinearError as error:
        return str(error)
    return ""


_default, _include = lora_model.dispatch_default, tuners_utils._maybe_include_all_linear_layers
lora_model.dispatch_default = dispatch
tuners_utils._maybe_include_all_linear_layers = include_all_linear
