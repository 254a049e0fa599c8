"""How a kernel walks over ops/hadamard.py's Kronecker product: two matrix products on tiles that tensor cores take.

    F1 ⊗ … ⊗ Fr = A ⊗ B,  a b = n        Y = A X Bᵀ        X [a, b]: one row of x

Why:     the Sylvester part H_{2^j} = H_2 ⊗ … ⊗ H_2 may be cut anywhere, so A takes the core (12, 20, 28, 148, …) and some of
         the twos, B the rest, where the padded tiles cost least.  A is padded to A1 (+ A2) rows with zeros: 148 to 128 + 32.
         Short tiles take R rows of x at once, A then being block-diagonal.  Entries are stored times √a and √b: ±1 for
         Hadamard matrices, and A's times a power of two that keeps A X as large as X: exact in every dtype.  What is left
         of the scales is applied in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mmqc.kernels.shared.device_facts import capability, power_of_two, shared_bytes
from mmqc.kernels.shared.plan import Refusal
from mmqc.ops.hadamard_matrix import hadamard_factors

MAX_OUTER = 320
MAX_INNER = 256
WGMMA_ROWS = 64
LEAST_SIDE = 16  # of a tile that tensor cores take
BYTES = 2  # of an entry
HOPPER = torch.device("cpu")  # for which the interpreter stands


@dataclass(frozen=True)
class Tiling:
    """a x b, padded to (A1 + A2) x B, R rows of x a tile; a = 1 means that B alone is the matrix."""

    a: int
    b: int
    A1: int
    A2: int
    B: int
    R: int

    @property
    def side(self) -> int:
        """Rows of a turn's tile."""
        return self.R * self.A1 + self.A2 if self.a > 1 else self.R

    @property
    def cost(self) -> float:
        """Multiply-adds of an element, weighted: two-part tiles and narrow ones keep tensor cores less busy."""
        rows = self.side
        products = rows * self.B * ((rows if self.a > 1 else 0) + self.B)
        return products / (self.R * self.a * self.b) * (1.25 if self.A2 else 1.0) * (1 + 16 / self.B)


def shared_need(t: Tiling, device: torch.device, stages: int = 1, operands: int = 2) -> int:
    """Bytes of shared memory that Triton takes, at most, for a turn of one operand or of one with its gate.

    What it was found to take, of 50 tilings: both matrices, a turn's tile, and copies of it under way; of a tile in two parts more,
    which are laid out anew between products, and elsewhere than on Hopper so is B.
    """
    hopper, whole = capability(device) in (0, 90), t.side * t.B  # the interpreter stands for Hopper
    entries = t.B**2 + (t.side**2 if t.a > 1 else 0)
    if hopper:
        entries += whole * (operands * (stages - 1) + 2) if stages > 1 else 2 * whole - whole // 5 if t.A2 else whole
    else:
        entries += (whole + t.B**2 + t.B * t.A2 + 512) if t.A2 else whole * (operands * (stages - 1) + 1)
    return BYTES * entries


def tiling(a: int, b: int) -> Tiling:
    """Pad a x b."""
    wide = power_of_two(b, LEAST_SIDE)
    if a == 1:
        return Tiling(1, b, 16, 0, wide, WGMMA_ROWS)
    whole, below = power_of_two(a, LEAST_SIDE), 1 << (a.bit_length() - 1)
    rest = power_of_two(a - below, LEAST_SIDE) if a > below else 0
    if a > WGMMA_ROWS and below + rest < whole:
        return Tiling(a, b, below, rest, wide, 1)
    return Tiling(a, b, whole, 0, wide, max(1, WGMMA_ROWS // whole))


def cuts(n: int) -> list[tuple[int, int]]:
    """The ways (a, b) to cut the factors of width n in two."""
    sizes = [f.shape[0] for f in hadamard_factors(n)]
    odd = [s for s in sizes if s & (s - 1)]
    twos = math.prod(s for s in sizes if not s & (s - 1))
    found = [(math.prod(odd) * (twos // b), b) for b in (1 << j for j in range(twos.bit_length()))]
    found += [(math.prod(odd[:i]), math.prod(odd[i:]) * twos) for i in range(len(odd))]
    return [(a, b) for a, b in found if b > 1 or n == 1]


@functools.cache
def best_tiling(n: int, device: torch.device = HOPPER) -> Tiling | str:
    """The cheapest tiling of width n that the device has shared memory for, or why there is none."""
    found, room = [tiling(a, b) for a, b in cuts(n)], shared_bytes(device)
    fitting = [t for t in found if (t.a == 1 or t.side <= MAX_OUTER) and t.B <= MAX_INNER and shared_need(t, device) <= room]
    if not fitting:
        sizes = " x ".join(str(f.shape[0]) for f in hadamard_factors(n))
        return f"no cut of width {n} = {sizes} fits {MAX_OUTER} x {MAX_INNER} and {room} bytes of shared memory"
    return min(fitting, key=lambda t: t.cost)


@dataclass(frozen=True)
class HadamardPlan:
    """A tiling and its matrices, padded, in the dtype of x: outer [R A1 + A2, R A1 + A2] (times ``outer_factor``), inner [B, B]."""

    tiling: Tiling
    outer: Tensor
    inner: Tensor


def outer_factor(t: Tiling) -> float:
    """The power of two below 1/√a."""
    return 2.0 ** -math.ceil(math.log2(t.a) / 2)


def matrices(t: Tiling, n: int) -> tuple[Tensor, Tensor]:
    """Outer and inner in float64, padded."""
    factors = hadamard_factors(n)
    product = functools.reduce(torch.kron, factors) if n <= MAX_INNER and factors else None
    if t.a == 1:
        inner = torch.ones(1, 1, dtype=torch.float64) if product is None else product
        outer = torch.zeros(16, 16, dtype=torch.float64)
    else:
        one = torch.ones(1, 1, dtype=torch.float64)
        odd = [f for f in factors if f.shape[0] & (f.shape[0] - 1)]
        twos = functools.reduce(torch.kron, [f for f in factors if not f.shape[0] & (f.shape[0] - 1)], one)
        left, right = one, one
        for f in odd:  # a core goes left as long as it fits there
            if right.shape[0] == 1 and left.shape[0] * f.shape[0] <= t.a:
                left = torch.kron(left, f)
            else:
                right = torch.kron(right, f)
        cut = t.a // left.shape[0]  # the twos that go left; a Sylvester matrix is the product of its parts
        left, right = (
            torch.kron(left, _sylvester_part(twos, cut)),
            torch.kron(right, _sylvester_part(twos, twos.shape[0] // cut)),
        )
        outer = torch.zeros(t.R * t.A1 + t.A2, t.R * t.A1 + t.A2, dtype=torch.float64)
        for r in range(t.R):
            outer[r * t.A1 : r * t.A1 + t.a, r * t.A1 : r * t.A1 + t.a] = left * math.sqrt(t.a)
        inner = right
    padded = torch.zeros(t.B, t.B, dtype=torch.float64)
    padded[: t.b, : t.b] = inner * math.sqrt(t.b)
    return outer, padded


def _sylvester_part(h: Tensor, order: int) -> Tensor:
    """The Sylvester matrix of a smaller order out of a larger one."""
    return h[:order, :order] * math.sqrt(h.shape[0] / order)


@functools.lru_cache(maxsize=64)
def hadamard_plan(n: int, device: torch.device, dtype: torch.dtype, cut: tuple[int, int] | None = None) -> HadamardPlan:
    """The plan of ``hadamard_factors(n)``, built once; ``cut`` (a, b) is for tuning."""
    t = best_tiling(n, device) if cut is None else tiling(*cut)
    if isinstance(t, str):
        raise ValueError(f"hadamard_quantize: {t}")
    outer, inner = matrices(t, n)
    outer *= outer_factor(t)
    return HadamardPlan(t, outer.to(device=device, dtype=dtype), inner.to(device=device, dtype=dtype))


# Of a width, for a device and a dtype.
Matrices = Callable[[int, torch.device, torch.dtype], HadamardPlan | Refusal]
UNKNOWN = Refusal("its factors are not those of hadamard_factors")


def matrices_of(factors: list[Tensor]) -> Matrices:
    """Those that stand for these factors, which the kernels know by the width alone."""
    return lambda n, device, dtype: hadamard_plan(n, device, dtype) if all_known(factors, n) else UNKNOWN


# By the tensor itself: an address belongs to another one when this one is gone.
_known: Any = WeakIdKeyDictionary()


def all_known(factors: list[Tensor], n: int) -> bool:
    """Whether these are ``hadamard_factors(n)``: compared once per tensor and version, for that waits for the device."""
    want = hadamard_factors(n)
    return len(factors) == len(want) and all(
        _is(f, w, (n, i)) for i, (f, w) in enumerate(zip(factors, want, strict=True))
    )


def _is(factor: Tensor, want: Tensor, which: tuple[int, int]) -> bool:
    answers = _known.setdefault(factor, {})
    key = (0 if factor.is_inference() else factor._version, *which)
    if key not in answers:
        answers[key] = factor.shape == want.shape and torch.equal(factor.to(want), want.to(factor.dtype).to(want))
    return answers[key]
