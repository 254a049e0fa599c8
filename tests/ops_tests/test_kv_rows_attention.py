"""kv_rows_attention against softmax attention over keys and values that are written out, in float64."""

from typing import Any

import pytest
import torch
from tolerance import assert_close
from torch import Tensor

import mmqc.ops  # noqa: F401
from mmqc.ops.kv_rows import to_rows

ops = torch.ops.mmqc
WAYS = [([14, 2], [4, 8]), ([13, 3], [3, 8]), ([16], [4]), ([9, 7], [5, 6]), ([1, 1], [4, 4]), ([10, 5, 1], [2, 4, 8])]


def case(
    tokens: int,
    widths: list[int],
    bits: list[int],
    *,
    heads: int = 2,
    group: int = 2,
    queries: int = 1,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Operands by name, and the keys and values that their rows stand for."""
    width, written, rows = sum(widths), [], []
    for _ in "kv":
        x = torch.randn(3, heads, tokens, width) + 2 * torch.randn(1, heads, 1, width)
        codes, scale, offset = ops.quantize_per_token(x, None, widths, bits)
        rows.append(to_rows(codes, scale, offset, widths, bits))
        repeated = [t.double().repeat_interleave(torch.tensor(widths), -1) for t in (scale, offset)]
        written.append(codes.double() * repeated[0] + repeated[1])
    q = torch.randn(3, heads * group, queries, width, dtype=torch.float64).to(dtype)
    c = {"q": q, "k_rows": rows[0], "v_rows": rows[1], "widths": widths, "bits": bits, "scaling": width**-0.5}
    return c, written[0], written[1]


@pytest.mark.parametrize(("widths", "bits"), WAYS)
@pytest.mark.parametrize(("group", "queries", "tokens"), [(1, 1, 1), (4, 1, 19), (2, 3, 7)])
def test_kv_rows_attention__is_softmax_over_written_out_tokens(
    group: int, queries: int, tokens: int, widths: list[int], bits: list[int]
) -> None:
    c, k, v = case(tokens, widths, bits, group=group, queries=queries)
    y = ops.kv_rows_attention(*c.values())
    for h in range(c["q"].shape[1]):
        x = c["scaling"] * (c["q"][:, h] @ k[:, h // group].mT)
        assert_close(y[:, h], x.softmax(-1) @ v[:, h // group])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kv_rows_attention__sums_in_float32(dtype: torch.dtype) -> None:
    c, _, _ = case(50, [14, 2], [4, 8], dtype=dtype)
    y = ops.kv_rows_attention(*c.values())
    assert y.dtype == dtype
    assert_close(y, ops.kv_rows_attention(*(c | {"q": c["q"].double()}).values()))


def test_kv_rows_attention__refuses_other_rows() -> None:
    c, _, _ = case(5, [14, 2], [4, 8])
    with pytest.raises(ValueError, match=r"v_rows is uint8 \[3, 2, 5, 25\]"):
        ops.kv_rows_attention(*(c | {"v_rows": c["v_rows"][..., 1:]}).values())
    with pytest.raises(ValueError, match="3 query heads do not share 2 KV heads"):
        ops.kv_rows_attention(*(c | {"q": c["q"][:, :3]}).values())
    with pytest.raises(ValueError, match="are no parts of 16 channels"):
        ops.kv_rows_attention(*(c | {"widths": [14, 3]}).values())


def test_kv_rows_attention__opcheck() -> None:
    c, _, _ = case(4, [14, 2], [4, 8], dtype=torch.float32)
    torch.library.opcheck(ops.kv_rows_attention.default, tuple(c.values()))
