"""Quadratic characters of small finite fields, for Paley's Hadamard matrices.

    chi(0) = 0,  chi(a) = 1 if a is a square of GF(q), else -1;      Q[i, j] = chi(a_i - a_j)      q = p^k odd

Shapes:  Q [q, q], float64
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with q = p^k for an odd prime p, else None."""
    p = next((d for d in range(3, int(q**0.5) + 1, 2) if q % d == 0), q)
    k = 0
    rest = q
    while rest % p == 0 and rest > 1:
        rest, k = rest // p, k + 1
    return (p, k) if q > 2 and q % 2 and rest == 1 else None


def _powers_of_a_generator(p: int, k: int) -> list[int]:
    """1, x, x², … in GF(p)[x] / f for the first f whose x generates the whole group; elements as base-p integers."""
    q = p**k
    for tail in itertools.product(range(p), repeat=k):
        element, powers = [1] + [0] * (k - 1), []
        while True:
            powers.append(sum(c * p**i for i, c in enumerate(element)))
            carry = element[-1]
            element = [(low + carry * t) % p for low, t in zip([0, *element[:-1]], tail, strict=True)]
            code = sum(c * p**i for i, c in enumerate(element))
            if code == 1 or code == 0 or len(powers) == q:
                break
        if code == 1 and len(powers) == q - 1:
            return powers
    raise AssertionError(f"GF({q}) has no primitive polynomial")


def _jacobsthal(p: int, k: int) -> Tensor:
    q = p**k
    chi = torch.zeros(q, dtype=torch.float64)
    powers = torch.tensor(_powers_of_a_generator(p, k))
    chi[powers[0::2]], chi[powers[1::2]] = 1.0, -1.0
    elements = torch.arange(q)
    difference = torch.zeros(q, q, dtype=torch.long)
    for place in range(k):
        digit = elements // p**place % p
        difference += (digit.unsqueeze(1) - digit) % p * p**place
    return chi[difference]


def jacobsthal_matrix(q: int) -> Tensor:
    """Q of GF(q); q must be an odd prime power."""
    field = prime_power(q)
    if field is None:
        raise ValueError(f"{q} is not an odd prime power")
    return _jacobsthal(*field)
