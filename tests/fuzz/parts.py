"""Norms and linears in the many ways in which models write them down: what ops are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D


class OwnRMSNorm(nn.Module):
    """Spelled out: with a gain, without, Gemma's, or in float32 as transformers has it."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.weight = None if how == "rms_bare" else nn.Parameter(torch.ones(width))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if self.how == "rms_cast" else x
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        if self.weight is None:
            return y
        return y * (1 + self.weight) if self.how == "gemma" else self.weight * y


class OwnLayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weight + self.bias


class DoubledLayerNorm(nn.LayerNorm):
    """A subclass that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def norm(how: str, width: int) -> nn.Module:
    """A norm by its name in the grammar."""
    if how == "none":
        return nn.Identity()
    if how == "library_rms":
        return nn.RMSNorm(width, eps=1e-6)
    if how == "own_layer":
        return OwnLayerNorm(width)
    if how == "doubled_layer":
        return DoubledLayerNorm(width)
    if how.startswith("layer"):
        return nn.LayerNorm(width, elementwise_affine=how != "layer_bare", bias=how != "layer_no_bias")
    return OwnRMSNorm(width, how)


class FalconLike(nn.Linear):
    """A subclass that computes the same in other words."""

    def forward(self, input: Tensor) -> Tensor:
        y = input @ self.weight.T
        return y if self.bias is None else y + self.bias


class DoubledLinear(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Product(nn.Module):
    """A product with a matrix that no nn.Linear owns, a parameter or a buffer."""

    def __init__(self, inner: int, outer: int, how: str) -> None:
        super().__init__()
        self.how, self.outer = how, outer
        shape = (outer, inner, 1, 1) if how == "conv1x1" else (outer, inner)
        if how == "buffer":
            self.register_buffer("weight", torch.zeros(shape))
        else:
            self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "matmul":
            return torch.matmul(x, self.weight.transpose(0, 1))
        if self.how == "einsum":
            return torch.einsum("...i,oi->...o", x, self.weight)
        if self.how == "conv1x1":  # as images have their channels
            return F.conv2d(x.transpose(-1, -2)[..., None], self.weight)[..., 0].transpose(-1, -2)
        if self.how == "sliced":
            half = self.outer // 2
            return torch.cat((F.linear(x, self.weight[:half]), F.linear(x, self.weight[half:])), -1)
        if self.how == "computed":
            return F.linear(x, self.weight * torch.linspace(0.5, 1.5, self.outer, dtype=x.dtype)[:, None])
        return F.linear(x, self.weight)


class Borrowed(nn.Linear):
    """Its weight is read a second time, as a reader of what it wrote."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y + F.linear(F.linear(y, self.weight.T), self.weight).tanh()


class Ties:
    """Weights that several linears share, by a name and a shape."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int, int], Any] = {}

    def linear(self, how: str, inner: int, outer: int) -> nn.Module:
        """A linear by its name in the grammar."""
        if how in ("plain", "bias"):
            return nn.Linear(inner, outer, bias=how == "bias")
        if how == "conv1d":
            return Conv1D(outer, inner)
        if how in ("falcon", "doubled", "borrowed"):
            return {"falcon": FalconLike, "doubled": DoubledLinear, "borrowed": Borrowed}[how](inner, outer)
        if how == "weight_norm":
            return parametrizations.weight_norm(nn.Linear(inner, outer))
        if how.startswith("tied"):
            made = nn.Linear(inner, outer)
            made.weight = self.known.setdefault((how, inner, outer), made.weight)
            return made
        return Product(inner, outer, how)


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Parameters and buffers of every kind away from their neutral values."""
    g = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for module in model.modules():
        of_norm = "Norm" in type(module).__name__
        for name, p in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(p) in seen or not p.is_floating_point():
                continue
            seen.add(id(p))
            draw = torch.randn(p.shape, generator=g, dtype=torch.float64)
            if p.ndim < 2:
                gain = of_norm or name in ("gain", "original0")
                p.copy_(torch.rand(p.shape, generator=g, dtype=torch.float64) + 0.5 if gain else 0.3 * draw)
            elif isinstance(module, nn.Embedding):
                p.copy_(draw)
            elif name == "original0":  # of weight_norm: lengths
                p.copy_(draw.abs() + 0.3)
            else:
                fan = p.shape[0] if isinstance(module, Conv1D) else p[0].numel()
                p.copy_(draw * fan**-0.5)
