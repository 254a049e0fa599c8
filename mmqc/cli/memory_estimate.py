"""How much memory quantizing a model will take, from its configuration alone: no weight is read.

    peak ≈ float weights + quantized weights + the inputs' second moments of every solver that wants them (4 K² bytes each)
           + one float32 copy of the largest weight

Activations and the calibration data come on top; they depend on the prompts.

    on each of n ranks that share the result ≈ quantized weights - (n - 1) / n of those that transformers' plan names
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from mmqc.config import HEAD, QuantConfig, Scheme
from mmqc.ops.pack import packed_width, stored_bits
from mmqc.passes.assign_scheme import kept
from mmqc.quantization.convert import size_of


@dataclass(frozen=True)
class Estimate:
    """Bytes.

    Attributes:
        weights: parameters and buffers as they are.
        quantized: the same after quantization.
        moments: second moments that GPTQ and its like collect.
        largest: the largest linear weight in float32.
        linears: how many linears would be quantized.
        bits: that a weight of these takes, its part of scales and zero points with it; 0 without any.
    """

    weights: int
    quantized: int
    moments: int
    largest: int
    linears: int
    bits: float = 0.0

    @property
    def peak(self) -> int:
        """Of the whole run, activations aside."""
        return self.weights + self.quantized + self.moments + self.largest


def stored(linear: Any, scheme: Scheme) -> int:
    """Bytes of codes and scales of a quantized linear; its bias is unchanged."""
    static = scheme.activation is not None
    width = packed_width(linear.in_features, stored_bits(scheme.weight.bits, static))
    groups = -(-linear.in_features // scheme.weight.group_size) if scheme.weight.group_size else 1
    if scheme.weight.float4:
        return linear.out_features * (width + groups) + (4 if scheme.weight.type == "nvfp4" else 0)
    inputs = 4 * (2 if scheme.activation is not None and scheme.activation.per_modality else 1) if scheme.static else 0
    return linear.out_features * (width + (4 + scheme.weight.zero_bits // 8) * groups) + inputs


def estimate(model: nn.Module, config: QuantConfig) -> Estimate:
    """The estimate for ``model``, which may be on the meta device.

    Towers are known by recording only, so every linear counts with the scheme of the language model, or with another tower's
    where that has none.
    """
    weights = size_of(model)
    saved = moments = largest = count = elements = bits = 0
    for _, linear, role, own in _linears(model, config):
        if own is None:
            continue
        count += 1
        elements, bits = elements + linear.weight.numel(), bits + 8 * stored(linear, own)
        shared = role and any(p is linear.weight for m in model.modules() if m is not linear for p in m.parameters(False))
        saved += (0 if shared else linear.weight.numel() * linear.weight.element_size()) - stored(linear, own)
        largest = max(largest, 4 * linear.weight.numel())
        moments += 4 * linear.in_features**2 if own.weight.needs_hessian else 0
    return Estimate(weights, weights - saved, moments, largest, count, bits / elements if elements else 0.0)


def _linears(model: nn.Module, config: QuantConfig) -> Iterator[tuple[str, nn.Linear, str, Scheme | None]]:
    """FQN, linear, role, scheme; no scheme where it stays in floating point."""
    scheme = config.language or config.projector or config.vision
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    for fqn, linear in model.named_modules():
        if type(linear) is not nn.Linear:
            continue
        role = "head" if linear is head else ""
        own = config.head if role and config.head is not None else scheme
        keeps = any(kept(p, fqn, role) for p in config.keeps(role) if p != HEAD or role)
        yield fqn, linear, role, None if keeps else own


def per_rank(model: nn.Module, config: QuantConfig, ranks: int) -> int | None:
    """Bytes of the quantized model on the first of ``ranks`` that share it; None where transformers has no plan, or they cannot.

    What a rank needs while it loads is the whole of it.
    """
    from mmqc.checkpoint.parallel import hf_parallel

    plan, whole = getattr(model, "tp_plan", None), estimate(model, config).quantized
    if not plan or not hf_parallel.heads_divide(model, ranks):
        return None
    for fqn, linear, role, own in _linears(model, config):
        style = plan.get(hf_parallel.starred(fqn)) or (hf_parallel.HEAD if role and own is not None else None)
        if style is None:
            continue
        unit = ranks * (own.weight.group_size or 1) if own is not None else ranks
        adds_up = style.startswith("row") and not linear.in_features % unit
        k, n = (linear.in_features // ranks, linear.out_features) if adds_up else (linear.in_features, linear.out_features / ranks)
        if n != int(n):
            continue
        each = linear.weight.element_size()
        if own is None:
            whole -= each * (linear.weight.numel() - k * int(n))
        else:
            whole -= stored(linear, own) - stored(SimpleNamespace(in_features=k, out_features=int(n)), own)
        if linear.bias is not None and not adds_up:
            whole -= each * (linear.out_features - int(n))
    return math.ceil(whole)


def available() -> int | None:
    """Bytes of memory that this machine can still give; None where that cannot be told."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
            lines = dict(line.split(":", 1) for line in file)
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
