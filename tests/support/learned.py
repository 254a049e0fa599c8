"""Operands of the ops of learned rounding, and what they refuse."""

from typing import Any

import torch
from torch import Tensor


def problem(m: int = 7, g: int = 12, bits: int = 2, asymmetric: bool = True) -> tuple[Any, ...]:
    """Codes, offsets that leave the grid here and there, steps, zeros and the gradients of the weight."""
    r = torch.Generator().manual_seed(m * g + bits)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (m, g), generator=r, dtype=torch.int8)
    codes[0] = 2 ** (bits - 1) - 1
    offset, step = torch.randn(m, g, generator=r), torch.rand(m, 1, generator=r) + 0.5
    zero = torch.randint(-2, 3, (m, 1), generator=r).float() if asymmetric else None
    return codes, offset, step, zero, torch.randn(m, g, generator=r)


def refused() -> list[tuple[dict[str, Tensor | int], str]]:
    """A change of these operands, and what is said of it."""
    return [
        ({"offset": torch.zeros(7, 3)}, r"are \[M, g\]"),
        ({"step": torch.ones(7)}, r"are \[M, g\]"),
        ({"codes": torch.zeros(7, 12)}, "codes are int8"),
        ({"zero": torch.ones(7, 1, dtype=torch.int8)}, "everything else is float32"),
        ({"bits": 1}, "2 to 8"),
    ]
