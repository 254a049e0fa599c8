"""Attention within segments by plain Triton, in the interpreter and on a GPU, against the same in float64, segment by segment."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_close

kernel = pytest.importorskip("mmqc.kernels.attention.packed_attention")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float32]
SMALL = kernel.Config(rows=32, keys=16, warps=4, stages=2)


def exact(q, k, v, ends, scale, *, causal):
    """In float64."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    q, k, v = q.double(), k.double(), v.double()
    y = torch.zeros_like(q)
    for a, b in pairwise(ends):
        s = q[:, :, a:b] @ k[:, :, a:b].transpose(2, 3) * scale
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf) if causal else s
        y[:, :, a:b] = s.softmax(-1) @ v[:, :, a:b]
    return y


def operands(heads, of_keys, d, rows, dtype, seed=0):
    g = torch.Generator(DEVICE).manual_seed(seed)
    packed = torch.randn(rows, heads + 2 * of_keys, d, generator=g, device=DEVICE, dtype=dtype)  # as a tower projects them
    q, k, v = (t.transpose(0, 1)[None] for t in packed.split((heads, of_keys, of_keys), dim=1))
    return 3 * q, k, v


CASES = [
    (2, 2, 80, [0, 1], False),
    (1, 1, 80, [0, 75], False),
    (2, 2, 72, [0, 33, 66], False),
    (2, 2, 64, [0, 1, 2, 70], False),
    (2, 1, 16, [0, 32, 64, 65, 80, 80, 99], False),
    (1, 1, 88, [0, 40, 40, 40], False),
    (1, 1, 112, [0, 20], False),
    (1, 1, 160, [0, 40], False),
    (1, 1, 256, [0, 33], False),
    (4, 2, 128, [0, 35, 65], True),
    (6, 2, 64, [0, 5, 71], True),
]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("config", [None, SMALL])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "of_keys", "d", "ends", "causal"), CASES)
@pytest.mark.parametrize("times", [1, 17])
def test_packed_attention__on_a_gpu(heads, of_keys, d, ends, causal, dtype, config, times):
    ends = [e * times for e in ends]
    q, k, v = operands(heads, of_keys, d, ends[-1], dtype)
    y = kernel.packed_attention(q, k, v, torch.tensor(ends, device=DEVICE), causal=causal, config=config)
    assert_close(y, exact(q, k, v, ends, d**-0.5, causal=causal), dtype)


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "of_keys", "d", "ends", "causal"), CASES)
def test_packed_attention__is_attention_of_each_segment(heads, of_keys, d, ends, causal, dtype):
    q, k, v = operands(heads, of_keys, d, ends[-1], dtype)
    of = torch.tensor(ends, device=DEVICE, dtype=torch.int32 if causal else torch.int64)
    y = kernel.packed_attention(q, k, v, of, 0.2, causal=causal, config=SMALL)
    assert y.dtype == dtype
    assert y.transpose(1, 2).is_contiguous()
    assert_close(y, exact(q, k, v, ends, 0.2, causal=causal), dtype)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.booleans())
def test_packed_attention__of_any_lengths(lengths, causal):
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    q, k, v = operands(1, 1, 24, ends[-1], DTYPES[0], seed=sum(ends))
    y = kernel.packed_attention(q, k, v, torch.tensor(ends, device=DEVICE), causal=causal, config=SMALL)
    assert_close(y, exact(q, k, v, ends, 24**-0.5, causal=causal), DTYPES[0])


@pytest.mark.parametrize("what", ["k", "v"])
def test_packed_attention__keeps_the_nans_of_a_segment_there(what):
    ends = [0, 17, 50]
    given = dict(zip("qkv", operands(2, 2, 80, 50, DTYPES[0]), strict=True))
    want = exact(**given, ends=ends, scale=80**-0.5, causal=False)
    given[what][:, :, 17:] = torch.nan
    y = kernel.packed_attention(**given, ends=torch.tensor(ends, device=DEVICE), config=SMALL)
    assert_close(y[:, :, :17], want[:, :, :17], DTYPES[0])
    assert y[:, :, 17:].isnan().all()


@pytest.mark.parametrize("shared", [232_448, 166_912, 101_376], ids=["hopper", "a100", "other-ampere"])
def test_configured__fits_any_width(shared):
    for d in range(16, 257):
        c, width = kernel.configured(d, shared), sum(kernel.widths(d))
        assert 2 * width * (c.rows + 2 * c.stages * c.keys) <= shared, (d, c)


def test_why_not__says_what_is_not_attended_to():
    q, ends = torch.zeros(1, 2, 8, 64, device=DEVICE, dtype=DTYPES[0]), torch.tensor([0, 8])
    assert kernel.why_not(q, q, q) is None
    assert "one type" in kernel.why_not(q, q.double(), q)
    assert "one width" in kernel.why_not(q, q[..., :32], q)
    assert "16 to 256 channels" in kernel.why_not(*[q[..., :8]] * 3)
    with pytest.raises(ValueError, match="packed_attention: "):
        kernel.packed_attention(q, q.double(), q, ends)
