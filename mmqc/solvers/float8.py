"""float8_e4m3fn weights: the largest magnitude of a row becomes the largest number.

    s = max|w| / 448        q = float8(w / s)

Shapes:  w [N, K]    s [N]    q float8_e4m3fn [N, K]
Error:   |w - q s| <= |w| / 16, and s 2^-10 next to zero: round to nearest, ties to even
"""

from __future__ import annotations

from torch import Tensor

from mmqc.ops.divide import divided
from mmqc.ops.pack import FLOAT8
from mmqc.ops.quantize import LARGEST
from mmqc.solvers.quantized import Quantized, checked, positive


def solve(weight: Tensor, *, skip: Tensor | None = None, name: str = "weight") -> Quantized:
    """Rounds ``weight`` [N, K]; the channels ``skip`` are 0, for something else computes them.

    Raises:
        ValueError: NaN or infinite values.
    """
    w = checked(weight, name, skip)
    scale = positive(divided(w.abs().amax(1), LARGEST))
    return Quantized((w / scale[:, None]).float().clamp(-LARGEST, LARGEST).to(FLOAT8), scale)
