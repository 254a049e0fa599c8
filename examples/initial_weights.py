"""Where the training of a sample starts from."""

from __future__ import annotations

import math

import torch
from torch import nn


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Variance-preserving weights; half of that for the last linear of each branch."""
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() < 2:
            continue
        std = 0.05 if "embed_tokens" in name else 0.8 / math.sqrt(p[0].numel())
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "fc2.weight")):
            std /= 2
        p.normal_(0, std)
