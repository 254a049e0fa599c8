"""decode_attention against PyTorch's attention; a cache's room may hold anything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close
from torch.nn import functional as F

from mmqc.ops import decode_attention as op

ops = torch.ops.mmqc


def case(batch=2, heads=2, rows=3, tokens=9, width=8, *, masked=True, alike=False, dtype=torch.float64):
    q = torch.randn(batch, heads, rows, width, dtype=dtype)
    k, v = (torch.randn(batch, heads, tokens, width, dtype=dtype) for _ in range(2))
    mask = torch.rand(1 if alike else batch, 1, 1, tokens) < 0.6 if masked else None
    return q, k, v, mask, 0.3


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 20), st.booleans(), st.booleans())
def test_decode_attention__is_attention(batch, heads, rows, tokens, masked, alike):
    q, k, v, mask, scale = case(batch, heads, rows, tokens, masked=masked, alike=alike)
    if mask is not None:
        mask[..., -1] = True
    y = ops.decode_attention(q, k, v, mask, scale)
    assert_close(y, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))


def test_decode_attention__does_not_meet_what_is_hidden():
    q, k, v, mask, scale = case()
    want = ops.decode_attention(q, k, v, mask, scale)
    hidden = ~mask.transpose(2, 3)
    k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.inf)
    assert torch.equal(ops.decode_attention(q, k, v, mask, scale), want)


def test_decode_attention__no_token_gives_zeros():
    q, k, v, _, scale = case()
    assert ops.decode_attention(q, k, v, torch.zeros(1, 1, 1, 9, dtype=torch.bool), scale).eq(0).all()


def test_decode_attention__refuses_other_shapes():
    q, k, v, mask, scale = case()
    with pytest.raises(ValueError, match="attends to"):
        ops.decode_attention(q, k[:, :1], v, mask, scale)
    with pytest.raises(ValueError, match="mask is bool"):
        ops.decode_attention(q, k, v, mask.float(), scale)
    with pytest.raises(ValueError, match="mask is bool"):
        ops.decode_attention(q, k, v, mask.expand(-1, -1, 3, -1), scale)


def test_decode_attention__opcheck():
    torch.library.opcheck(ops.decode_attention.default, case())
    torch.library.opcheck(ops.decode_attention.default, case(masked=False))


def test_decode_attention__sums_in_float32():
    q, k, v, mask, scale = case(dtype=torch.bfloat16)
    want = op.reference(q.double(), k.double(), v.double(), mask, scale)
    assert_close(ops.decode_attention(q, k, v, mask, scale), want, torch.bfloat16)
