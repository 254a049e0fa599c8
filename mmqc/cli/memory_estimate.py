"""How much memory quantizing a model will take, from its configuration alone: no weight is read.

    peak ≈ float weights + quantized weights + the inputs' second moments of every solver that wants them (4 K² bytes each)
           + one float32 copy of the largest weight

Activations and the calibration data come on top; they depend on the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def stored(linear: nn.Linear, scheme: Scheme) -> int:
    """Bytes of codes and scales of a quantized linear; its bias is unchanged."""
    static = scheme.activation is not None
    width = packed_width(linear.in_features, stored_bits(scheme.weight.bits, static))
    groups = -(-linear.in_features // scheme.weight.group_size) if scheme.weight.group_size else 1
    if scheme.weight.float4:
        return linear.out_features * (width + groups) + (4 if scheme.weight.type == "nvfp4" else 0)
    inputs = 4 * (2 if scheme.activation is not None and scheme.activation.per_modality else 1) if scheme.static else 0
    return linear.out_features * (width + 4 * groups) + inputs


def estimate(model: nn.Module, config: QuantConfig) -> Estimate:
    """The estimate for ``model``, which may be on the meta device.

    Towers are known by recording only, so every linear counts with the scheme of the language model, or with another tower's
    where that has none.
    """
    scheme = config.language or config.projector or config.vision
    weights = size_of(model)
    saved = moments = largest = count = elements = bits = 0
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    for fqn, linear in model.named_modules():
        if type(linear) is not nn.Linear:
            continue
        role = "head" if linear is head else ""
        own = config.head if role and config.head is not None else scheme
        if own is None or any(kept(p, fqn, role) for p in config.keeps(role) if p != HEAD or role):
            continue
        count += 1
        elements, bits = elements + linear.weight.numel(), bits + 8 * stored(linear, own)
        shared = role and any(p is linear.weight for m in model.modules() if m is not linear for p in m.parameters(False))
        saved += (0 if shared else linear.weight.numel() * linear.weight.element_size()) - stored(linear, own)
        largest = max(largest, 4 * linear.weight.numel())
        moments += 4 * linear.in_features**2 if own.weight.needs_hessian else 0
    return Estimate(weights, weights - saved, moments, largest, count, bits / elements if elements else 0.0)


def available() -> int | None:
    """Bytes of memory that this machine can still give; None where that cannot be told."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
            lines = dict(line.split(":", 1) for line in file)
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return None
