"""ResQ's bound on the error of quantizing in two precisions (arXiv:2412.14363, Theorem 4.2)."""

import math


def error_bound(energy: float, high_energy: float, width: int, high: int, bits: int, high_bits: int) -> float:
    """Theorem 4.2's bound on E|X - X_q|_F from E|X|_F and E|X P_h|_F; it holds for normally distributed coordinates."""
    low_factor = math.sqrt(math.pi * math.log(width - high)) / (2 ** (bits - 1) - 1)
    high_factor = math.sqrt(math.pi * math.log(high)) / (2 ** (high_bits - 1) - 1)
    return low_factor * energy - (low_factor - high_factor) * high_energy
