"""Operands of the ops that take a norm in."""

import torch


def operands(residual: bool, dtype: torch.dtype = torch.float32) -> tuple:
    """x [2, 3, 24], r or none, gain, bias, eps."""
    x, r = (torch.randn(2, 3, 24).to(dtype) for _ in "xr")
    return x, r if residual else None, torch.randn(24).to(dtype), torch.randn(24).to(dtype), 1e-5
