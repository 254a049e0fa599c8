"""A tiny Qwen2-VL whose linears are QuantLinears, made by hand: for tests of what runs a quantized model."""

from typing import Any

import torch
from models import IMAGE, VIDEO, tiny_qwen2_vl
from torch import nn

from mmqc.nn.linear import QuantLinear
from mmqc.nn.modality import ModalityContext
from mmqc.solvers import Quantized


def _ranges(model: nn.Module, inputs: dict[str, Any]) -> dict[str, float]:
    ranges: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            ranges[name] = max(ranges.get(name, 0.0), args[0].abs().max().item())

        return hook

    handles = [m.register_forward_pre_hook(watch(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return ranges


def quantized_vlm(weight_bits: int = 8, *, depth: int = 2, layers: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """(model, a batch with two images): both towers in W{bits}A8, the decoder with one scale per modality."""
    model, inputs = tiny_qwen2_vl(depth=depth, layers=layers)
    ranges = _ranges(model, inputs)
    context = ModalityContext.attach(model, (IMAGE, VIDEO))
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or name == "lm_head":
            continue
        decoder = "language_model" in name
        scale = ranges[name] / 127
        W = linear.weight.detach()
        s_w = W.abs().amax(1) / (2 ** (weight_bits - 1) - 1)
        quantized = QuantLinear.from_parts(
            Quantized(torch.round(W / s_w[:, None]).to(torch.int8), s_w),
            weight_bits=weight_bits,
            activation_bits=8,
            bias=None if linear.bias is None else linear.bias.detach(),
            input_scale=torch.tensor([scale, 0.8 * scale] if decoder else [scale]),
            modality=context if decoder else None,
        )
        model.set_submodule(name, quantized)
    return model.eval(), inputs
