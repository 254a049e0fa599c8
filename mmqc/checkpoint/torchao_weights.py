"""Linears that torchao quantized, as ours: the same codes and scales, behind mmqc's kernels.

A model quantized by torchao compiles under ``backend="mmqc"`` as it is, and torchao's own arithmetic runs.  ``adopt_torchao_``
swaps the linears whose arithmetic is ``weight_only_matmul``'s:

    Int8Tensor                 int8 [N, K], scale [N, 1], no activation quantization     W8A16
    IntxUnpackedToInt8Tensor   2, 3, 4 or 8 bits in int8, scale [N, K/g], zero points 0  WbA16-g

Whatever else (dynamic activations, float8, layouts packed for one kernel) is left as it is and returned with the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmqc.nn.linear import QuantLinear
from mmqc.report.report import Refusal
from mmqc.solvers import Quantized

Parts = tuple[torch.Tensor, torch.Tensor, int, int]  # codes [N, K], scale [N] or [N, K/g], bits, group size


def adopt_torchao_(model: nn.Module) -> list[Refusal]:
    """Swaps the linears of ``model`` that torchao quantized, in place.

    Returns:
        Those that stay torchao's, by FQN, and why.
    """
    left: list[Refusal] = []
    for fqn, module in list(model.named_modules()):
        if type(module) is not nn.Linear or type(module.weight.data) is torch.Tensor:
            continue
        parts = _parts(module.weight)
        if isinstance(parts, str):
            left.append(Refusal(fqn, "", parts))
            continue
        codes, scale, bits, group = parts
        new = QuantLinear.from_parts(
            Quantized(codes, scale, group_size=group),
            weight_bits=bits,
            bias=None if module.bias is None else module.bias.detach(),
            dtype=module.weight.dtype,
        )
        model.set_submodule(fqn, new.train(module.training))
    return left


def _parts(weight: Any) -> Parts | str:
    """Codes and scales of a torchao weight, or why it has none that ours could take."""
    kind = type(weight.data).__name__
    if kind == "Int8Tensor":
        return int8_parts(weight.data)
    if kind == "IntxUnpackedToInt8Tensor":
        return _intx(weight.data)
    return f"torchao's {kind} stays as it is: its layout or number format is not mmqc's"


def int8_parts(weight: Any) -> Parts | str:
    """Codes and scales of an Int8Tensor, or why its arithmetic is not ``weight_only_matmul``'s."""
    if getattr(weight, "act_quant_kwargs", None) is not None:
        return "its activations are quantized at run time, which mmqc's modules do not do"
    if getattr(weight, "zero_point", None) is not None and bool(weight.zero_point.any()):
        return "it has zero points"
    codes, scale = weight.qdata, weight.scale
    if scale.shape == (codes.shape[0], 1):
        return codes, scale[:, 0], 8, 0
    return f"its scales {list(scale.shape)} are not one per output channel"


def _intx(weight: Any) -> Parts | str:
    if weight.activation_quantization is not None:
        return "its activations are quantized at run time, which mmqc's modules do not do"
    if weight.zero_point is not None and bool(weight.zero_point.any()):
        return "it has zero points"
    bits = int(str(weight.target_dtype).removeprefix("torch.int"))
    if bits not in (2, 3, 4, 8):
        return f"mmqc stores no codes of {bits} bits"
    codes, scale = weight.qdata, weight.scale
    width = codes.shape[1]
    if scale.shape[1] == 1:
        return codes, scale[:, 0], bits, 0
    return codes, scale, bits, width // scale.shape[1]
