"""What modules with an integer weight share: how they store codes, and what a change of dtype leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from mmqc.nn.online_hadamard import OnlineHadamard
from mmqc.ops.pack import FLOAT8, stored_bits

SCALES = ("weight_scale", "input_scale")  # float32 whatever the model's dtype


class IntegerWeight(OnlineHadamard):
    """Base class; ``float_dtype`` is that of the float weight that the codes stand for."""

    weight_bits: int
    activation_bits: int | None
    group_size: int
    float_dtype: torch.dtype
    float8 = False  # codes of 8 bits, activations' and weights', are float8_e4m3fn

    @property
    def storage_bits(self) -> int:
        """In how many bits a code is stored."""
        return stored_bits(self.weight_bits, self.activation_bits is not None)

    @property
    def code_dtype(self) -> torch.dtype:
        """Of activations' codes, and of the weight's where these have 8 bits."""
        return FLOAT8 if self.float8 else torch.int8

    @property
    def scheme(self) -> str:
        """E.g. W4A16-g128, W4A16-g128-asym with zero points, W8A8-fp8."""
        group = f"-g{self.group_size}" if self.group_size else ""
        group += "" if self._buffers.get("weight_zero") is None else "-asym"
        group += "-fp8" if self.float8 else ""
        return f"W{self.weight_bits}A{self.activation_bits or 16}{group}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales, codes = {name: self._buffers.get(name) for name in SCALES}, self._buffers.get("qweight")
        super()._apply(fn, recurse)
        moved = self._buffers.get("qweight")
        if codes is not None and moved is not None and moved.dtype != codes.dtype:  # float8 is no number of the model's
            self._buffers["qweight"] = codes.to(moved.device)
        self.float_dtype = fn(torch.empty(0, dtype=self.float_dtype)).dtype
        for name, old in scales.items():  # half() means the arithmetic around a linear, not its scales
            new = self._buffers.get(name)
            if old is not None and new is not None and new.dtype.itemsize < old.dtype.itemsize:
                self._buffers[name] = old.to(device=new.device, dtype=torch.float32)
        return self
