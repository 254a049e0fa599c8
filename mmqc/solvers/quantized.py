"""What every weight solver returns, and the conditions that every weight must meet.

w ≈ (codes - zero) · scale        codes, zero integer in [-2^(b-1), 2^(b-1) - 1], or zero float16, or codes float8_e4m3fn, or twice
                                  e2m1's numbers
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from mmqc.ops.float4 import store_scale


@dataclass(frozen=True)
class Quantized:
    """An integer matrix and its scales.

    Attributes:
        codes: int8 or float8_e4m3fn [N, K].
        scale: float32 [N], or [N, ceil(K/g)] with one scale per g input channels; positive and finite.
        note: what the solver had to do beyond its recipe (more damping, dead columns); empty if nothing.
        zero: int8, or float16 where zero may lie between the codes, shaped like ``scale``; None if all zero points are 0.
        group_size: g; 0 means the whole row.
        amplifier: a power of two of which the scales are integer multiples of 1 / amplifier; 0: any floats.
        step: float32 [N], positive, of which a row's scales are small integer multiples: codes times these are 8-bit integers;
            None: there is no such step.
        form: "mxfp4" or "nvfp4": codes are twice e2m1's numbers and scales half of what such a format stores (ops/float4.py).
        divisor: float32 [1], nvfp4's for the tensor.
    """

    codes: Tensor
    scale: Tensor
    note: str = ""
    zero: Tensor | None = None
    group_size: int = 0
    amplifier: int = 0
    step: Tensor | None = None
    form: str = ""
    divisor: Tensor | None = None

    @property
    def integer(self) -> bool:
        """Whether the scales are integers over something."""
        return bool(self.amplifier) or self.step is not None

    def integer_scales(self) -> tuple[Tensor, Tensor]:
        """(t int32 [N, K/g], s float32 [N]) with scale = t s; t int8 where |codes t| <= 127; only where ``integer``."""
        if self.step is not None:
            return (self.scale.double() / self.step.double()[:, None]).round().to(torch.int8), self.step
        rows = self.scale.new_full((self.scale.shape[0],), 1 / self.amplifier)
        return (self.scale.double() * self.amplifier).round().to(torch.int32), rows

    def stored_scale(self) -> Tensor:
        """The bytes uint8 [N, ceil(K/g)] of the scales of a ``form``; exact."""
        return store_scale(self.scale * (2 if self.divisor is None else 2 * self.divisor), self.form)

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        tensors = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **tensors)

    def dequantize(self) -> Tensor:
        """The weight that the codes stand for: (codes - zero) · scale, float32 [N, K]."""
        centred = self.codes.float() if self.zero is None else self.codes.float() - self.by_channel(self.zero)
        return centred * self.by_channel(self.scale)

    def by_channel(self, part: Tensor) -> Tensor:
        """``scale`` or ``zero`` as they broadcast over the codes."""
        if not self.group_size:
            return part[:, None]
        return part.repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]


def levels(bits: int) -> tuple[int, int]:
    """The lowest and the highest code of symmetric ``bits``-bit integers, e.g. (-8, 7)."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def checked(weight: Tensor, name: str, skip: Tensor | None = None) -> Tensor:
    """``weight`` [N, K], detached, in float64 if it was that already, otherwise in float32; 0 in the channels ``skip``.

    Raises:
        ValueError: not a matrix, or NaN or infinite somewhere.
    """
    if weight.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}; a weight solver needs a matrix [out, in]")
    w = weight.detach()
    w = w if w.dtype == torch.float64 else w.float()
    # float32, because that is what the scale is stored in: 1e300 is as unusable as infinity
    bad = ~torch.isfinite(w.float())
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name} holds {int(bad.sum())} values that are NaN or infinite in float32, the first at "
            f"[{row}, {column}]; repair the checkpoint, or list the layer in QuantConfig.keep"
        )
    return w if skip is None else w.index_fill(1, skip.to(w.device), 0)


def positive(scale: Tensor) -> Tensor:
    """``scale`` as float32, with 1 in place of 0, so that an all-zero row gives codes 0 and no NaN."""
    scale = scale.float()
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def rounded(w: Tensor, scale: Tensor, bits: int) -> Tensor:
    """round(w / scale), clamped to the codes of ``bits`` bits, still in w's dtype; ties to even."""
    lowest, highest = levels(bits)
    return torch.round(w / scale.to(w.dtype)).clamp_(lowest, highest)
