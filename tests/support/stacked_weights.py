"""Operands of grouped_matmul: stacked weights of four experts, and how nine rows are spread over them."""

import torch

from mmqc.ops.pack import pack, unpack

COUNTS = {"uneven": [3, 0, 5, 1], "all_to_one": [0, 0, 9, 0], "nothing": [0, 0, 0, 0], "none_for_some_rows": [2, 3, 0, 2]}


def stacked(n: int, k: int, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four experts: (stored weights, scales, bias, dense float64 weights)."""
    top = 2 ** (bits - 1)
    codes = torch.randint(-top, top, (4, n, k), dtype=torch.int8)
    scale = torch.rand(4, n, -(-k // group)) if group else torch.rand(4, n)
    spread = scale.repeat_interleave(group, -1)[..., :k] if group else scale[..., None]
    return codes if bits == 8 else pack(codes, bits), scale, torch.randn(4, n), codes.double() * spread.double()


def with_zeros(n: int, k: int, bits: int, group: int, between: bool = False) -> tuple[torch.Tensor, ...]:
    """Four experts with zero points, maybe ``between`` the codes: (stored weights, scales, bias, dense float64 weights, these)."""
    w, scale, bias, _ = stacked(n, k, bits, group)
    top = 2 ** (bits - 1)
    zero = torch.randint(-top, top, scale.shape, dtype=torch.int8)
    zero = (zero + torch.rand(scale.shape)).half() if between else zero
    codes = w if bits == 8 else unpack(w, k, bits)
    spread = [t.repeat_interleave(group, -1)[..., :k] if group else t[..., None] for t in (zero, scale)]
    return w, scale, bias, (codes.double() - spread[0].double()) * spread[1].double(), zero


def offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
