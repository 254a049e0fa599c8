"""Integer Scale: group scales become integers, so that a quantized product stays in int32 until its last group.

    t[n, j] = round(s[n, j] alpha)        w = q s  ->  q t / alpha        alpha a power of two
    y[m, n] = s_x(m) float(sum_j C_j[m, n] t[n, j]) / alpha        C_j = sum over k of group j of x_q[m, k] q[n, k]

    overflow:  |sum over any of the j of C_j t[n, j]| <= sum_j c[n, j] |t[n, j]|        c[n, j] = max over x_q of |C_j|
               c = max(127 p + 128 r, 128 p + 127 r), p the sum of the positive q of the group, r that of the negative |q|

Shapes:  s float32, t int32, c [N, K/g]    q int8 [N, K]
Error:   |s - t / alpha| <= 1 / (2 alpha).  A scale that would round to zero gets t = 1 (its sign kept), and its group's codes are
         rounded again to that step.
Source:  arXiv:2405.14597, section 4.1 (equation 2, listing 1); sections 6.1 and B.4 name the risk of overflow.  The bound holds
         for every input of 8 bits, in any order of summation: a layer beyond 2^31 - 1 keeps float scales.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..config import WeightSpec
from .quantized import Quantized, levels

LIMIT = 2**31  # of |acc|, exclusive
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
    """The largest magnitude that the accumulator of any output, or any part of it, can have for 8-bit inputs; exact.

    Args:
        codes: int8 [N, K].
        integer: the integer scales [N, ceil(K/g)], of either sign.
        group_size: g.
    """
    bound = 0
    rows = max(1, (1 << 24) // max(1, codes.shape[1]))
    for q, t in zip(codes.split(rows), integer.to(torch.int64).split(rows), strict=True):
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
    alpha = heuristic_amplifier(scale) if spec.amplifier == "heuristic" else int(spec.amplifier)
    integer = torch.round(scale * alpha)
    lost = (integer == 0) & (scale != 0)
    integer = torch.where(lost, scale.sign(), integer)
    codes = _rounded_again(solved.codes, scale * alpha, integer, lost, spec)
    # a float32 holds 24 bits of an integer: beyond, the product of t and 1 / alpha would be another number
    fits = bool((integer.abs() <= 2**24).all())
    bound = overflow_bound(codes, integer, spec.group_size) if fits else LIMIT
    if bound >= LIMIT:
        why = f"a sum can reach {bound:.2e} >= 2^31" if fits else "a scale is beyond 24 bits"
        return _noted(solved, f"integer scales with amplifier {alpha} could overflow ({why}): float scales")
    text = f"integer scales: amplifier {alpha}, sums below {bound / LIMIT:.1%} of 2^31"
    if lost.any():
        text += f"; {int(lost.sum())} of {lost.numel()} scales are below 1/{2 * alpha} and became 1/{alpha}"
    made = dataclasses.replace(solved, codes=codes, scale=(integer / alpha).float(), amplifier=alpha)
    return _noted(made, text)


def _rounded_again(codes: Tensor, wanted: Tensor, integer: Tensor, lost: Tensor, spec: WeightSpec) -> Tensor:
    """Codes of the groups whose scale was ``lost``, rounded to the step that they have now."""
    if not lost.any():
        return codes
    lowest, highest = levels(spec.bits)
    groups = grouped(codes, spec.group_size)
    ratio = (wanted / integer).where(lost, 1.0)
    again = torch.round(groups * ratio[:, :, None]).clamp_(lowest, highest).to(torch.int8)
    return torch.where(lost[:, :, None], again, groups).flatten(1)[:, : codes.shape[1]].contiguous()


def _noted(solved: Quantized, text: str) -> Quantized:
    return dataclasses.replace(solved, note="; ".join(filter(None, (solved.note, text))))
