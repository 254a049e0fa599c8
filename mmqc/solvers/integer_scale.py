"""Integer Scale: group scales become integers, so that a quantized product stays in int32 until its last group.

    t[n, j] = floor or ceil of s[n, j] alpha, at least 1        alpha a power of two
    q'[n, k] = clamp(round(q s alpha / t))        w = q s  ->  q' t / alpha        of the two t the one with less error
    y[m, n] = s_x(m) float(sum_j C_j[m, n] t[n, j]) / alpha        C_j = sum over k of group j of x_q[m, k] q'[n, k]

    overflow:  |sum over any of the j of C_j t[n, j]| <= sum_j c[n, j] |t[n, j]|        c[n, j] = max over x_q of |C_j|
               c = max(127 p + 128 r, 128 p + 127 r), p the sum of the positive q of the group, r that of the negative |q|

Shapes:  s float32, t int32, c [N, K/g]    q int8 [N, K]
Error:   the paper rounds t alone and keeps q: an error of |w| / (2 t), 64 / t steps of an 8-bit code.  Rounding q again to the
         step leaves half a step, and q' = q where t is large.  Negative scales give negative t; a scale of zero stays zero.
Progressive:  s_w[n] = max_j |s[n, j]| / T in place of 1 / alpha, T = 127 / 2^(b-1) rounded down, 15 for 4 bits: then
         |q' t| <= 127, and the sum over groups is one int8 product over all of K, of x_q and q' t.
Source:  arXiv:2405.14597, section 4.1 (equation 2, listing 1); sections 6.1 and B.4 name the risk of overflow.  The bound holds
         for every input of 8 bits, in any order of summation: a layer beyond 2^31 - 1 keeps float scales.  Progressive: QServe,
         arXiv:2405.04532, section 4.1.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mmqc.config import WeightSpec
from mmqc.ops.divide import divided
from mmqc.solvers.quantized import Quantized, levels, positive

LIMIT = 2**31  # of |acc|, exclusive
ROUND_AGAIN = True  # the codes, to the integer step; False is the paper's form, for comparison
LOWEST, HIGHEST = levels(8)  # codes of an activation


def heuristic_amplifier(scale: Tensor) -> int:
    """The smallest power of two, from 1 up, that lifts the smallest nonzero |scale| to 1 (listing 1)."""
    smallest = scale[scale != 0].double().abs()
    amplifier = 1
    while smallest.numel() and smallest.min() * amplifier < 1:
        amplifier *= 2
    return amplifier


def grouped(codes: Tensor, group_size: int) -> Tensor:
    """Codes [N, K] as [N, ceil(K/g), g], zeros where the last group has no columns."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % group_size))
    return padded.reshape(codes.shape[0], -1, group_size)


def overflow_bound(codes: Tensor, integer: Tensor, group_size: int) -> int:
    """The largest magnitude that the accumulator of any output, or any part of it, can have for 8-bit inputs.

    In float64, which is exact below 2^53: of a bound below 2^31 every term is an integer below that.

    Args:
        codes: int8 [N, K].
        integer: the integer scales [N, ceil(K/g)], of either sign.
        group_size: g.
    """
    bound = 0
    rows = max(1, (1 << 24) // max(1, codes.shape[1]))
    for q, t in zip(codes.split(rows), integer.double().split(rows), strict=True):
        q = grouped(q, group_size).to(torch.int32)
        up, down = q.clamp(min=0).sum(-1), -q.clamp(max=0).sum(-1)
        largest = torch.maximum(HIGHEST * up - LOWEST * down, -LOWEST * up + HIGHEST * down)
        bound = max(bound, int((largest * t.abs()).sum(1).max()))
    return bound


def with_integer_scales(solved: Quantized, spec: WeightSpec, *, name: str = "weight") -> Quantized:
    """``solved`` with scales that are integers over an amplifier, or as it is where an int32 sum could overflow.

    Args:
        solved: codes and float group scales of any solver.
        spec: bits, group size and amplifier are read.
        name: FQN for error messages.

    Returns:
        Its ``note`` says the amplifier and the bound, or why the scales stayed floats.

    Raises:
        ValueError: scales that are no group scales, or not finite.
    """
    scale = solved.scale.double()
    if scale.dim() != 2:
        raise ValueError(f"{name}: integer scales need group scales [N, K/g], not {list(scale.shape)}; use PerGroup(g)")
    if spec.amplifier is None:
        raise ValueError(f"{name}: the spec asks for no integer scales: set WeightSpec.amplifier")
    if not torch.isfinite(scale).all():
        raise ValueError(f"{name}: a group scale is NaN or infinite; check the weight and the solver")
    if spec.amplifier == "progressive":
        return _progressive(solved, scale, spec)
    alpha = heuristic_amplifier(scale) if spec.amplifier == "heuristic" else int(spec.amplifier)
    codes, integer = (_best_steps if ROUND_AGAIN else _nearest_steps)(solved.codes, scale * alpha, spec)
    bound = overflow_bound(codes, integer, spec.group_size)
    # a float32 holds 24 bits of an integer: beyond, the product of t and 1 / alpha would be another number
    if bound >= LIMIT or bool((integer.abs() > 2**24).any()):
        why = f"a sum can reach {bound:.2e} >= 2^31" if bound >= LIMIT else "a scale is beyond 24 bits"
        return _noted(solved, f"integer scales with amplifier {alpha} could overflow ({why}): float scales")
    text = f"integer scales: amplifier {alpha}, sums below {bound / LIMIT:.1%} of 2^31"
    small = int(((scale * alpha).abs() < 0.5).logical_and(scale != 0).sum())
    if small:
        text += f"; {small} of {scale.numel()} scales are below 1/{2 * alpha} and became 1/{alpha}"
    scale = (integer / alpha).float()
    made = dataclasses.replace(solved, codes=codes, scale=scale, amplifier=alpha, group_size=spec.group_size)
    return _noted(made, text)


def _progressive(solved: Quantized, scale: Tensor, spec: WeightSpec) -> Quantized:
    """Integer scales up to T over a step of each row; rows of zeros have the step 1."""
    largest = HIGHEST // 2 ** (spec.bits - 1)
    step = positive(divided(scale.abs().amax(1), largest))
    wanted = (scale / step.double()[:, None]).clamp(-largest, largest)  # step is rounded to float32
    codes, integer = _best_steps(solved.codes, wanted, spec)
    bound = overflow_bound(codes, integer, spec.group_size)
    if bound >= LIMIT:
        return _noted(solved, f"progressive scales could overflow (a sum can reach {bound:.2e} >= 2^31): float scales")
    text = f"integer scales: up to {largest} over a step of each row, sums below {bound / LIMIT:.1%} of 2^31"
    scale = (integer * step.double()[:, None]).float()
    return _noted(dataclasses.replace(solved, codes=codes, scale=scale, step=step, group_size=spec.group_size), text)


def _nearest_steps(codes: Tensor, wanted: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor]:
    """The paper's: the nearest integer, at least 1, and the codes as they were."""
    del spec
    return codes, wanted.sign() * wanted.abs().round().clamp(min=1)


def _best_steps(codes: Tensor, wanted: Tensor, spec: WeightSpec) -> tuple[Tensor, Tensor]:
    """The integer below or above, whichever stands for the group with less error once its codes are rounded to that step."""
    lowest, highest = levels(spec.bits)
    kept = codes.shape[1]
    made = []
    rows = max(1, (1 << 22) // max(1, kept))
    for q, s in zip(grouped(codes, spec.group_size).split(rows), wanted.split(rows), strict=True):
        value = q * s[:, :, None]
        best_codes, best_step, least = q, s.sign(), torch.full_like(s, torch.inf)
        for whole in (s.abs().floor(), s.abs().ceil()):
            step = s.sign() * whole.clamp(min=1)
            divisor = torch.where(step == 0, torch.ones_like(step), step)[:, :, None]
            again = torch.round(value / divisor).clamp_(lowest, highest)
            error = (value - again * divisor).square_().sum(-1)
            better = error < least
            best_codes = torch.where(better[:, :, None], again.to(torch.int8), best_codes)
            best_step, least = torch.where(better, step, best_step), torch.where(better, error, least)
        made.append((best_codes.flatten(1)[:, :kept], best_step))
    new_codes, steps = zip(*made, strict=True)
    return torch.cat(new_codes), torch.cat(steps)


def _noted(solved: Quantized, text: str) -> Quantized:
    return dataclasses.replace(solved, note="; ".join(filter(None, (solved.note, text))))
