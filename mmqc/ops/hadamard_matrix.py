"""Orthogonal matrices with flat entries, for every width, as Kronecker factors.

    n = c 2^j :  H_c ⊗ H_{2^j}            entries ±1/√n
    else      :  D_m ⊗ H_c ⊗ H_{2^j}      D_m[i, k] = (cos + sin)(2π i k / m) / √m, |entries| <= √2/√n

Sylvester  H_2 = [[1, 1], [1, -1]] / √2, H_{2^j} = H_2 ⊗ … ⊗ H_2
Paley I    q ≡ 3 (mod 4):  I + [[0, 1ᵀ], [-1, Q]],                                  order q + 1
Paley II   q ≡ 1 (mod 4):  S ⊗ [[1, 1], [1, -1]] + I ⊗ [[1, -1], [-1, -1]],         order 2 (q + 1), S = [[0, 1ᵀ], [1, Q]]
Williamson four symmetric circulants with A² + B² + C² + D² = 4m I,                 order 4m
Shapes:    factors [a, a] in float64; at most 64 where the factor is a power of two
blocks    I_t ⊗ H_{n/t}, for t ranks that each have an n/t of the channels
A width is never padded.  Cores above ``MAX_CORE`` are not used: a factor of size a costs a multiply-adds an element.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mmqc.ops.finite_field import jacobsthal_matrix, prime_power

MAX_CORE = 512
MAX_SYLVESTER = 64

# First rows of A, B, C, D for the orders 4m that Paley's constructions miss.  The row of 43 is constant on the cosets of
# {±1, ±6, ±7}, those of 23 and 29 on {±1}: found by exhaustive search over such rows, checked by the tests.
WILLIAMSON = {
    23: ("+--+-+-++++++++++-+-+--", "+--+--+++------+++--+--", "+--++-+-+-++++-+-+-++--", "+++---++--++++--++---++"),
    29: (
        "+--++----+-++++++++-+----++--",
        "++--++-+-++++----++++-+-++--+",
        "+--+---+-+--++++++--+-+---+--",
        "+-+++-+++--+-++++-+--+++-+++-",
    ),
    43: (
        "+-+-+----++++-++++-++--++-++++-++++----+-+-",
        "+--++----+-+---+--++++++++--+---+-+----++--",
        "++-+--++-+++----+++-++++-+++----+++-++--+-+",
        "+--+++--+-+--+-+++++-++-+++++-+--+-+--+++--",
    ),
}


def _sylvester(n: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def _bordered(q: Tensor, sign: float) -> Tensor:
    n = q.shape[0] + 1
    s = torch.zeros(n, n, dtype=torch.float64)
    s[0, 1:], s[1:, 0], s[1:, 1:] = 1.0, sign, q
    return s


def _paley(c: int) -> Tensor | None:
    if prime_power(c - 1) and c % 4 == 0:
        return torch.eye(c, dtype=torch.float64) + _bordered(jacobsthal_matrix(c - 1), -1.0)
    half = c // 2
    if prime_power(half - 1) and half % 4 == 2 and c % 2 == 0:
        s = _bordered(jacobsthal_matrix(half - 1), 1.0)
        eye = torch.eye(half, dtype=torch.float64)
        plus, minus = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
        return torch.kron(s, plus.double()) + torch.kron(eye, minus.double())
    return None


def _williamson(c: int) -> Tensor | None:
    rows = WILLIAMSON.get(c // 4) if c % 4 == 0 else None
    if rows is None:
        return None
    m = c // 4
    shift = (torch.arange(m).unsqueeze(0) - torch.arange(m).unsqueeze(1)) % m
    A, B, C, D = (torch.tensor([1.0 if s == "+" else -1.0 for s in row], dtype=torch.float64)[shift] for row in rows)
    blocks = ((A, B, C, D), (-B, A, -D, C), (-C, D, A, -B), (-D, -C, B, A))
    return torch.cat([torch.cat(row, 1) for row in blocks])


def _hartley(m: int) -> Tensor:
    i = torch.arange(m, dtype=torch.int64)
    angle = 2 * math.pi * (i.unsqueeze(1) * i % m).double() / m
    return angle.cos() + angle.sin()


def _has_core(c: int) -> bool:
    if c % 4 or c > MAX_CORE:
        return False
    half = c // 2
    paley_one = prime_power(c - 1) is not None
    paley_two = half % 4 == 2 and prime_power(half - 1) is not None
    return paley_one or paley_two or c // 4 in WILLIAMSON


def _divisors(m: int) -> list[int]:
    return [d for d in range(1, m + 1) if m % d == 0]


@functools.cache
def _cores(m: int, twos: int) -> tuple[int, ...] | None:
    """Orders of non-Sylvester Hadamard matrices whose product is m (odd) times at most 2^twos; the cheapest set."""
    if m == 1:
        return ()
    found: list[tuple[int, ...]] = [(m << j,) for j in range(2, twos + 1) if _has_core(m << j)]
    for d in _divisors(m)[1:-1]:
        for j in range(2, twos - 1):
            rest = _cores(m // d, twos - j) if _has_core(d << j) else None
            if rest:
                found.append((d << j, *rest))
    return min(found, key=sum, default=None)


@functools.cache
def plan(n: int) -> tuple[int, tuple[int, ...], int]:
    """(m, cores, 2^j): the orders of the Hartley block, of the Hadamard cores and of the Sylvester part of width n."""
    if n < 1:
        raise ValueError(f"a width is at least 1, not {n}")
    twos = (n & -n).bit_length() - 1
    odd = n >> twos
    for m in _divisors(odd):
        cores = _cores(odd // m, twos)
        if cores is not None:
            return m, cores, n // (m * math.prod(cores))
    raise AssertionError("unreachable: m = odd always has a plan")


def _split_sylvester(n: int) -> list[int]:
    if n <= MAX_SYLVESTER:
        return [n] if n > 1 else []
    twos = n.bit_length() - 1
    parts = math.ceil(twos / int(math.log2(MAX_SYLVESTER)))
    return [1 << (twos // parts + (i < twos % parts)) for i in range(parts)]


def _core(c: int) -> Tensor:
    h = _paley(c)
    h = _williamson(c) if h is None else h
    if h is None:
        raise AssertionError(f"no construction for H{c}")
    return h


@functools.cache
def _factor(kind: str, n: int) -> Tensor:
    build = {"DHT": _hartley, "core": _core, "H": _sylvester}[kind]
    # The cache must hold real CPU tensors even if a meta-device or fake-tensor context asks first.
    with torch.device("cpu"), _disable_current_modes():
        return build(n) / math.sqrt(n)


def hadamard_factors(n: int, blocks: int = 1) -> list[Tensor]:
    """Float64 factors whose Kronecker product is an orthogonal n x n matrix (a Hadamard matrix where one is known).

    With ``blocks`` it is that of n / blocks, so many times along the diagonal.

    Raises:
        ValueError: n is no multiple of ``blocks``.
    """
    if blocks > 1:
        with torch.device("cpu"), _disable_current_modes():
            return [torch.eye(blocks, dtype=torch.float64), *hadamard_factors(part(n, blocks))]
    m, cores, power = plan(n)
    factors = [_factor("DHT", m)] if m > 1 else []
    factors += [_factor("core", c) for c in cores]
    factors += [_factor("H", a) for a in _split_sylvester(power)]
    return [f.clone() for f in factors]


def part(n: int, blocks: int) -> int:
    """The width of a block.

    Raises:
        ValueError: n is no multiple of ``blocks``.
    """
    if n % blocks:
        raise ValueError(f"a width of {n} has no {blocks} equal blocks")
    return n // blocks


def hadamard_kind(n: int, blocks: int = 1) -> str:
    """What ``hadamard_factors`` used, e.g. "H12 x H64", "DHT269 x H16" or "I8 x H4 x H512"."""
    if blocks > 1:
        return f"I{blocks} x {hadamard_kind(part(n, blocks))}"
    m, cores, power = plan(n)
    names = [f"DHT{m}"] if m > 1 else []
    names += [f"H{c}" for c in cores]
    names += [f"H{power}"] if power > 1 or not names else []
    return " x ".join(names)


def hadamard_cost(n: int, blocks: int = 1) -> int:
    """Multiply-adds of one transform of width n, factor by factor: n (a1 + ... + ar)."""
    if blocks > 1:
        return blocks * hadamard_cost(part(n, blocks))
    m, cores, power = plan(n)
    return n * sum((*((m,) if m > 1 else ()), *cores, *_split_sylvester(power)))
