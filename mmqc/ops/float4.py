"""Weights as floats of 4 bits: e2m1 codes, and the scales of 8 bits that a block of them shares.

    e2m1       a sign, two bits of exponent, one of mantissa: 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives
    mxfp4      w = e2m1 2^(e - 127)     e one byte (e8m0) for 32 input channels
    nvfp4      w = e2m1 s / d           s float8_e4m3fn for 16 input channels, d float32 for the tensor

Shapes:  codes int8 [N, K], twice the e2m1 numbers: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, so integers
         packed uint8 [N, ceil(K/2)], e2m1's own four bits, two a byte as in pack.py
         stored scale uint8 [N, ceil(K/B)]: the bytes e, or those of s
Source:  OCP Microscaling Formats Specification v1.0, sections 5.3.3 and 5.4.1, for e2m1 and e8m0; NVIDIA's NVFP4 for the scales in
         two steps, with d as compressed-tensors stores it (``weight_global_scale``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.pack import FLOAT8, pack, unpack
from mmqc.specs import BLOCKS

HALVES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers that a code without its sign stands for
LARGEST = 12
BIAS = 127  # of e8m0


def round_float4(x: Tensor) -> Tensor:
    """The nearest codes to ``x``, still in x's dtype; of equal distances the one with an even mantissa, as IEEE 754 rounds."""
    size = x.abs()
    step = 1 + (size >= 4).to(x) + 2 * (size >= 8).to(x)
    return (torch.round(x / step) * step).clamp_(-LARGEST, LARGEST)


def pack_float4(codes: Tensor) -> Tensor:
    """Int8 codes [N, K] -> bytes [N, ceil(K/2)]."""
    places = torch.zeros(LARGEST + 1, dtype=torch.int8, device=codes.device)
    places[torch.tensor(HALVES, device=codes.device)] = torch.arange(8, dtype=torch.int8, device=codes.device)
    bits = places[codes.abs().long()] + 8 * (codes < 0).to(torch.int8)
    return pack(bits - 8, 4)


def unpack_float4(packed: Tensor, width: int) -> Tensor:
    """Bytes [N, ceil(width/2)] -> int8 codes [N, width]; the negative zero is zero."""
    numbers = torch.tensor([*HALVES, *(-h for h in HALVES)], dtype=torch.int8, device=packed.device)
    return numbers[unpack(packed, width, 4).long() + 8]


def read_scale(stored: Tensor, form: str) -> Tensor:
    """The numbers, float32, that the bytes of scales stand for: 2^(e - 127), or s."""
    if form == "nvfp4":
        return stored.view(FLOAT8).float()
    return torch.exp2(stored.float() - BIAS)


def store_scale(scale: Tensor, form: str) -> Tensor:
    """The bytes of the scale that is nearest to each positive float32; ``read_scale`` of them is exact for those that are one.

    The least is 2^-126, or 2^-9: a scale of zero would lose its block's codes.
    """
    if form == "nvfp4":
        return scale.float().clamp(2.0**-9, 448).to(FLOAT8).view(torch.uint8)
    mantissa, exponent = torch.frexp(scale.float().clamp(min=2.0**-126))  # scale = mantissa 2^exponent, 1/2 <= mantissa < 1
    nearest = exponent - 1 + (mantissa > 0.75).to(exponent)
    return (nearest + BIAS).clamp(1, 254).to(torch.uint8)


def half_steps(stored: Tensor, form: str, divisor: Tensor | None) -> Tensor:
    """Float32 [N, ceil(K/B)]: what a code is multiplied with."""
    scale = read_scale(stored, form)
    return 0.5 * (scale if divisor is None else scale / divisor.float())


def check_form(form: str) -> None:
    """Raise unless ``form`` is one of the two."""
    if form not in BLOCKS:
        raise ValueError(f"form = {form!r}: one of {sorted(BLOCKS)}")
