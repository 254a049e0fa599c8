"""kv_token_attention against softmax attention over tokens that were rounded by hand, in float64."""

from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import Tensor

import mmqc.ops  # noqa: F401
from mmqc.ops.kv_token_attention import dequantize_tokens, quantize_tokens

ops = torch.ops.mmqc


def case(
    counts: tuple[int, ...],
    *,
    bits: int = 4,
    block: int = 8,
    heads: int = 2,
    group: int = 2,
    width: int = 16,
    queries: int = 1,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Operands by name, and the keys and values that they stand for."""
    room = max(counts) + 2
    x = [torch.randn(len(counts), heads, room, width, dtype=torch.float64).to(dtype) for _ in range(2)]
    parts = [quantize_tokens(t, bits, block) for t in x]
    for b, n in enumerate(counts):
        for t in (*parts[0][1:], *parts[1][1:]):
            t[b, :, n:] = torch.nan
    names = ("k_codes", "k_scale", "k_offset", "v_codes", "v_scale", "v_offset")
    c = dict(zip(names, (*parts[0], *parts[1]), strict=True))
    q = torch.randn(len(counts), heads * group, queries, width, dtype=torch.float64).to(dtype)
    count = torch.tensor(counts, dtype=torch.int32)
    return {"q": q, **c, "count": count, "bits": bits, "scaling": width**-0.5}, x[0], x[1]


def by_hand(x: Tensor, bits: int, block: int) -> Tensor:
    out = x.clone()
    for part in out.reshape(-1, x.shape[-1]):
        for i in range(0, x.shape[-1], block):
            low, high = part[i : i + block].min(), part[i : i + block].max()
            step = (high - low) / (2**bits - 1)
            part[i : i + block] = ((part[i : i + block] - low) / step).round() * step + low
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "queries", "block"), [(1, 1, 16), (4, 3, 8), (2, 1, 4)])
def test_kv_token_attention__is_softmax_over_rounded_tokens(bits: int, group: int, queries: int, block: int) -> None:
    c, k, v = case((7, 0, 19), bits=bits, group=group, queries=queries, block=block)
    y, lse = ops.kv_token_attention(*c.values())
    k, v = (by_hand(t, bits, block) for t in (k, v))
    for b, n in enumerate(c["count"].tolist()):
        for h in range(c["q"].shape[1]):
            x = c["scaling"] * (c["q"][b, h] @ k[b, h // group, :n].T)
            assert_close(y[b, h], x.softmax(-1) @ v[b, h // group, :n])
            assert_close(lse[b, h], x.logsumexp(-1).float())
    assert (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_tokens__is_within_a_step(bits: int, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(5, 24) + 7 * torch.randn(5, 1)).to(dtype)
    codes, scale, offset = quantize_tokens(x, bits, 8)
    assert codes.shape == (5, 24 * bits // 8)
    assert scale.dtype == offset.dtype == dtype
    back = dequantize_tokens(codes, scale, offset, bits, torch.float32)
    assert ((back - x.float()).abs() <= 1.01 * scale.float().repeat_interleave(8, -1)).all()
    if dtype == torch.float32:
        assert_close(dequantize_tokens(*quantize_tokens(back, bits, 8), bits, dtype), back)


def test_quantize_tokens__one_value_and_errors() -> None:
    x = torch.full((2, 8), 3.5)
    assert torch.equal(dequantize_tokens(*quantize_tokens(x, 4, 4), 4, torch.float32), x)
    with pytest.raises(ValueError, match="bits = 2"):
        quantize_tokens(x, 2, 4)
    with pytest.raises(ValueError, match="block = 3"):
        quantize_tokens(x, 4, 3)


def test_kv_token_attention__opcheck() -> None:
    c, _, _ = case((3, 5), dtype=torch.float32)
    torch.library.opcheck(ops.kv_token_attention.default, tuple(c.values()))
