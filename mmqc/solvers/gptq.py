"""GPTQ: round one input channel after the other, and let the later ones make up for each rounding error.

    minimise  tr (W - Q) H (W - Q)ᵀ        H = Xᵀ X, the second moment of the layer's inputs

    U upper triangular, UᵀU = (H + λ I)⁻¹.  For i = 0 ... K-1:
        e = (w_i - q_i) / U_ii        w_j <- w_j - e U_ij   for all j > i

Shapes:  W [N, K]    H [K, K]    s [N]    q int8 [N, K]
Source:  Frantar et al., arXiv:2210.17323, with QuaRot's settings, which are MQuant's (arXiv:2502.00425, Algorithm 1):
         blocks of 128, λ = 1 % of H's mean diagonal, channels in order of falling diagonal (act_order),
         scales by the mse clip of the untouched weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)

from ..config import WeightSpec
from .factor import inverse_factor_
from .mse_clip import clip_scale
from .quantized import Quantized, checked
from .rtn import absmax_scale

BLOCK = 128
DAMPING = 0.01


def solve(
    weight: Tensor,
    spec: WeightSpec,
    hessian: Tensor | None = None,
    *,
    skip: Tensor | None = None,
    name: str = "weight",
    clip: bool = True,
    act_order: bool = True,
    damping: float = DAMPING,
    block: int = BLOCK,
    overwrite: bool = False,
) -> Quantized:
    """Quantizes ``weight`` [N, K] against the inputs' second moment.

    The sweep runs in float64 if the weight is float64, otherwise in float32; the factorization always in float64.

    Args:
        weight: floating point [N, K].
        spec: bits are read; one scale per output channel.
        hessian: XᵀX [K, K] of the layer's inputs, up to any positive factor.
        skip: int64 indices of input channels that something else computes: zero before solving, codes 0, and taken
            out of H, so that the other channels are solved as if these did not exist.
        name: FQN for error messages.
        clip: scales by the mse clip; False means absmax.
        act_order: channels of large inputs first.
        damping: λ as a fraction of the mean diagonal.
        block: channels between two updates of the rest; changes speed only.
        overwrite: a float64 ``hessian`` on the weight's device may be used up: 2.9 GB less for 18,944 channels.

    Raises:
        ValueError: no hessian, one of another shape, not finite or not positive semidefinite; NaN or infinite weights;
            a per-group spec.
    """
    if spec.group_size:
        raise ValueError(f"{name}: the gptq solver has one scale per output channel; use PerRow(), or solver 'rtn'")
    w = checked(weight, name)
    h = _checked_hessian(hessian, w, name, overwrite)
    skipped = torch.zeros(w.shape[1], dtype=torch.bool, device=w.device)
    if skip is not None:
        skipped[skip.to(w.device)] = True
    dead = (h.diagonal() <= 0) & ~skipped
    out = skipped | dead
    # an input that is always zero says nothing about its weights: zero is the code that costs nothing (QuaRot)
    w = w.masked_fill(out, 0)
    scale = clip_scale(w, spec.bits) if clip else absmax_scale(w, spec.bits)
    notes = [f"{int(dead.sum())} input channels are always zero"] if dead.any() else []
    if out.all():
        return Quantized(torch.zeros_like(w, dtype=torch.int8), scale, "; ".join(notes))
    _decouple_(h, out)
    first = h.diagonal() if act_order else torch.zeros_like(h[0])
    order = torch.argsort(first, descending=True, stable=True)
    u, used = inverse_factor_(h, order, damping, name)
    if used != damping:
        notes.append(f"damping {used:g} of the mean diagonal instead of {damping:g}: the inputs are nearly dependent")
    codes_KN = _sweep(w.T[order].contiguous(), scale, u, spec.bits, block)
    codes = torch.empty_like(codes_KN)
    codes[order] = codes_KN
    return Quantized(codes.T.contiguous().masked_fill_(out, 0), scale, "; ".join(notes))


def _checked_hessian(hessian: Tensor | None, w: Tensor, name: str, overwrite: bool) -> Tensor:
    """In float64 on the device of ``w``, and free to be written to."""
    k = w.shape[1]
    if hessian is None:
        raise ValueError(f"{name}: the gptq solver needs calibration data; pass calibration=, or use solver 'mse_clip'")
    if hessian.shape != (k, k):
        raise ValueError(
            f"{name}: the second moment has shape {tuple(hessian.shape)}, but the weight has {k} input channels"
        )
    h = hessian.detach().to(w.device, torch.float64)
    if not torch.stack(torch.aminmax(h)).isfinite().all():
        raise ValueError(f"{name}: the second moment of its inputs is NaN or infinite; the calibration run overflowed")
    return h if overwrite or h.data_ptr() != hessian.data_ptr() else h.clone()


def _decouple_(h: Tensor, out: Tensor) -> None:
    """Decouple the channels ``out`` from the rest, at the mean diagonal of the rest."""
    mean = h.diagonal().masked_fill(out, 0).sum() / (~out).sum()
    h[out] = 0
    h[:, out] = 0
    h.diagonal().masked_fill_(out, mean)


def _sweep(w_KN: Tensor, scale: Tensor, u: Tensor, bits: int, block: int) -> Tensor:
    """The codes int8 [K, N]; ``w_KN`` is used up.  Transposed, so that a channel is one contiguous row."""
    codes = torch.empty_like(w_KN, dtype=torch.int8)
    s = scale.to(w_KN.dtype)
    for start in range(0, len(w_KN), block):
        stop = min(start + block, len(w_KN))
        rows = u[start:stop].to(w_KN.dtype)  # in float32 the whole of U would be half as large as H again
        codes[start:stop], errors = torch.ops.mmqc.gptq_block(
            w_KN[start:stop], rows[:, start:stop], s.expand(stop - start, -1), None, bits
        )
        w_KN[stop:].addmm_(rows[:, stop:].T, errors, alpha=-1)
    return codes
