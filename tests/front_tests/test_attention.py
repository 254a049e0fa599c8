"""The variable-length attention function against one attention call per sequence."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from float64 import EXACT, relative_error
from torch import nn
from torch.nn import functional as F

from mmqc.front.attention import check, varlen_attention

LENGTHS = (5, 1, 7, 3)


def case(heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, sum(LENGTHS), 8, generator=g).to(dtype) for n in (heads, kv_heads, kv_heads))
    return q, k, v, torch.tensor((0, *LENGTHS)).cumsum(0).int()


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    parts = [t.repeat_interleave(q.shape[1] // t.shape[1], 1).split(LENGTHS, 2) for t in (q, k, v)]
    outputs = [F.scaled_dot_product_attention(*part, is_causal=causal, scale=0.3) for part in zip(*parts, strict=True)]
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_varlen_attention__equals_one_call_per_sequence(heads: int, kv_heads: int, causal: bool) -> None:
    q, k, v, ends = case(heads, kv_heads, torch.float64)
    y, weights = varlen_attention(nn.Module(), q, k, v, scaling=0.3, cu_seq_lens_q=ends, cu_seq_lens_k=ends, is_causal=causal)
    assert weights is None
    assert relative_error(y, one_by_one(q, k, v, causal)) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_varlen_attention__keeps_the_dtype(dtype: torch.dtype) -> None:
    q, k, v, ends = case(4, 4, dtype)
    y, _ = varlen_attention(nn.Module(), q, k, v, scaling=0.3, cu_seq_lens_q=ends, is_causal=False)
    assert y.dtype == dtype
    assert y.shape == (1, sum(LENGTHS), 4, 8)


def test_op__equals_the_masked_form_and_checks() -> None:
    q, k, v, ends = case(4, 2, torch.float64)
    op = torch.ops.mmqc_front.scaled_dot_product_attention.default
    torch.library.opcheck(op, (q, k, v, ends, ends, 0.3, False, max(LENGTHS)))
    q.requires_grad_(True)
    masked, _ = varlen_attention(nn.Module(), q, k, v, scaling=0.3, cu_seq_lens_q=ends, is_causal=False)
    masked.sum().backward()
    assert q.grad is not None
    assert relative_error(masked.detach(), one_by_one(q, k, v, False).detach()) < EXACT


def test_check__counts_its_own_calls_thread_by_thread() -> None:
    q, k, v, ends = case(4, 4, torch.float32)
    both = threading.Barrier(2, timeout=60)

    def run(lengths: torch.Tensor | None, times: int) -> tuple[int, int]:
        with check() as calls:
            both.wait()
            for _ in range(times):
                varlen_attention(nn.Module(), q, k, v, cu_seq_lens_q=lengths, is_causal=False)
            both.wait()
        return calls.packed, calls.other

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(run, ends, 3), pool.submit(run, None, 2)
    assert (one.result(), two.result()) == ((3, 0), (0, 2))
    with check() as outer:
        with check() as inner:
            varlen_attention(nn.Module(), q, k, v, cu_seq_lens_q=ends)
        varlen_attention(nn.Module(), q, k, v)
    assert (inner.packed, inner.other) == (1, 0)
    assert (outer.packed, outer.other) == (0, 1)
