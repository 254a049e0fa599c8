"""A packed cache with ragged lengths, for the tests of kv_attention: its operands, and the same tokens dequantized."""

from typing import Any

import torch
from torch import Tensor

import mmqc.ops  # noqa: F401
from mmqc.ops.kv_words import unpack_words

ops = torch.ops.mmqc
NAMES = (
    "q",
    "k_words",
    "v_words",
    "k_scale",
    "k_offset",
    "v_scale",
    "v_offset",
    "visual_count",
    "k_text",
    "v_text",
    "text_count",
    "bits",
    "scaling",
    "tau1",
    "tau2",
)


def packed_case(
    visual: tuple[int, ...],
    text: tuple[int, ...],
    *,
    heads: int = 2,
    group: int = 2,
    width: int = 16,
    bits: int = 2,
    values: str = "channel",
    tau: tuple[float, float] = (0.0, 0.0),
    queries: int = 1,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    room: int = 0,
) -> dict[str, Any]:
    """Operands of kv_attention by name; what no token owns is NaN."""
    g = torch.Generator().manual_seed(hash((visual, text, heads, group, width, bits)) % 2**31)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    batch, most = len(visual), max(max(visual), 1) + room
    shift = rand(1, heads, 1, width)
    order = torch.arange(most).expand(batch, most)
    count = torch.tensor(visual, dtype=torch.int32)
    x = [(rand(batch, heads, most, width) + shift).to(dtype).to(device) for _ in range(2)]
    shrink = 0.5 if bits == 1 else 1.0
    where = (order.to(device), count.to(device))
    k_words, k_scale, k_offset = ops.kv_pack(x[0], *where, bits, "channel", shrink, False)
    v_words, v_scale, v_offset = ops.kv_pack(x[1], *where, bits, values, shrink, True)
    k_text, v_text = (rand(batch, heads, max(max(text), 1) + room, width).to(dtype) for _ in range(2))
    for b, n in enumerate(text):
        k_text[b, :, n:] = v_text[b, :, n:] = torch.nan
    q = rand(batch, heads * group, queries, width).to(dtype)
    text_count = torch.tensor(text, dtype=torch.int32, device=device)
    values_ = (
        q.to(device),
        k_words,
        v_words,
        k_scale,
        k_offset,
        v_scale,
        v_offset,
        count.to(device),
        k_text.to(device),
        v_text.to(device),
        text_count,
        bits,
        width**-0.5,
        *map(float, tau),
    )
    return dict(zip(NAMES, values_, strict=True))


def dequantized(c: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """K and V of the visual tokens [B, H, N, D]."""
    k = unpack_words(c["k_words"], c["bits"]).to(c["k_scale"].dtype) * c["k_scale"] + c["k_offset"]
    u = unpack_words(c["v_words"], c["bits"], True).to(c["v_scale"].dtype)
    return k, u * c["v_scale"] + c["v_offset"]
