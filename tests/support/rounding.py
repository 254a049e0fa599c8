"""Round to nearest by the textbook, every candidate written out: the symmetric grids of solvers/rtn.py."""

import torch
from torch import Tensor


def nearest(w: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes like w [..., g] and float32 scales [..., 1]: the first step for 8 bits, else the best of three, for 2 bits of four."""
    top = 2 ** (bits - 1) - 1
    high, low = w.amax(-1, keepdim=True), w.amin(-1, keepdim=True)
    widest = torch.maximum(high, -low) / top
    widest = torch.where(widest > 0, widest, 1).float()
    factors = [torch.ones_like(high)]
    if bits < 8:
        factors += [factors[0] * (2 * top / (2 * top + 1) * (1 + 2**-20)), torch.maximum(high / top, -low / (top + 1)) / widest]
    if bits == 2:
        factors += [factors[0] / 2]
    best, codes, scales = torch.full_like(high, torch.inf), torch.zeros_like(w), torch.ones_like(high)
    for factor in factors:
        step = (widest * torch.where(factor > 0, factor, 1).float()).to(w)
        tried = (w / step).round().clamp(-top - 1, top)
        error = (tried * step - w).square().sum(-1, keepdim=True)
        better = error < best * (1 - 1e-6)
        best, codes, scales = torch.where(better, error, best), torch.where(better, tried, codes), torch.where(better, step, scales)
    return codes, scales.float()
