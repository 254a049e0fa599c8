"""Operands of grouped_matmul: stacked weights of four experts, and how nine rows are spread over them."""

import torch

from mmqc.ops.pack import pack

COUNTS = {
    "uneven": [3, 0, 5, 1],
    "all_to_one": [0, 0, 9, 0],
    "nothing": [0, 0, 0, 0],
    "none_for_some_rows": [2, 3, 0, 2],
}


def stacked(n: int, k: int, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four experts: (stored weights, scales, bias, dense float64 weights)."""
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (4, n, k), dtype=torch.int8)
    scale = torch.rand(4, n, -(-k // group)) if group else torch.rand(4, n)
    spread = scale.repeat_interleave(group, -1)[..., :k] if group else scale[..., None]
    return codes if bits == 8 else pack(codes, bits), scale, torch.randn(4, n), codes.double() * spread.double()


def offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
