"""Attention of a packed sequence as one op, and what computes it: our kernel, torch's, or a call for each of its segments.

    y_i = softmax(s q_i Kᵀ + m_i) V,   m_ij = 0 if segment(i) = segment(j), else −∞;  causal: and j <= i

Shapes:  query [1, H, T, D]   key, value [1, H_kv, T, D]   ends int [n + 1], from 0 to T   y [1, H, T, D], in memory as [1, T, H, D]
How:     opaque to a trace.  It attends segment by segment as a call for each would have done, to the bit; on CUDA in half
         precision it is our kernel on Hopper (``by_segments`` says for which), elsewhere torch's variable-length one.
The op is called what torch calls attention: the passes know by that what it does with channels and tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HALF = (torch.float16, torch.bfloat16)
# Of several segments.  One is our kernel's whatever its length: cuDNN makes a plan for each, in 75 ms, and in 1 s where that wants
# a kernel which is not compiled yet (results/new_lengths.json).
MANY = 2048  # rows from which on our kernel is the faster one on Hopper: 139 us for 204 at 3,600 (results/segment_attention.json)
LONG = 1024  # rows of the longest segment: shorter ones leave most of a tile of scores unused


@dataclass
class Check:
    """The calls of the function in a check: with sequence lengths, and without.

    In a check every sequence gets the attention that the tower gave it, to the bit: in half precision, behind many layers of
    codes that flip, another order of the same sums looks like another model.
    """

    packed: int = 0
    other: int = 0


_CHECK: ContextVar[Check | None] = ContextVar("check", default=None)  # the innermost of this thread


@contextmanager
def check() -> Iterator[Check]:
    """Attend as the tower does, and count."""
    calls = Check()
    token = _CHECK.set(calls)
    try:
        yield calls
    finally:
        _CHECK.reset(token)


def checked() -> Check | None:
    """Of the innermost check of this thread."""
    return _CHECK.get()


def segments(cu_seq_lens: Tensor, length: int) -> Tensor:
    """The segment [T] that each position belongs to; without reading a value."""
    positions = torch.arange(length, device=cu_seq_lens.device, dtype=cu_seq_lens.dtype)
    return torch.searchsorted(cu_seq_lens, positions, right=True)


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    ends_q: Tensor | None,
    ends_k: Tensor | None,
    scale: float | None,
    dropout: float,
    causal: bool,
) -> Tensor:
    """The same by a mask of T x T: torch can differentiate it, and export it."""
    if ends_q is not None and ends_k is not None:
        mask = segments(ends_q, q.shape[2])[:, None] == segments(ends_k, k.shape[2])[None, :]
        mask = mask & torch.ones_like(mask).tril() if causal else mask
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def reference(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, scale: float | None, causal: bool, longest: int
) -> Tensor:
    """The op, eagerly: [1, H, T, D] in and out; the result lies in memory as [1, T, H, D], as its reader wants it."""
    if q.is_cuda and (y := by_segments(q, k, v, ends_q, ends_k, scale, causal, longest)) is not None:
        return y
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    if len(ends_q) == len(ends_k) == 2:  # one sequence: torch has faster kernels for that, and nothing has to be read
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return y.transpose(1, 2).contiguous().transpose(1, 2)
    if q.is_cuda and q.dtype in HALF and q.shape[-1] <= 256 and _CHECK.get() is None:
        return _kernel(q, k, v, ends_q, ends_k, scale, causal, longest)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():  # no value can be read, and a replay has other ones
        y = masked(q, k, v, None, ends_q, ends_k, scale, 0.0, causal)
        return y.transpose(1, 2).contiguous().transpose(1, 2)
    y = _fake(q, k, v, ends_q, ends_k, scale, causal, longest).zero_()
    edges_q, edges_k = ends_q.tolist(), ends_k.tolist()
    for (a, b), (c, d) in zip(pairwise(edges_q), pairwise(edges_k), strict=True):
        y[:, :, a:b] = F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], is_causal=causal, scale=scale)
    return y


def by_segments(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, scale: float | None, causal: bool, longest: int
) -> Tensor | None:
    """By our kernel on Hopper, for one segment, or many rows of several; None elsewhere.  Operands as the op's (``reference``)."""
    same = ends_q.data_ptr() == ends_k.data_ptr() and ends_q.shape == ends_k.shape  # known without reading them
    if not same or _CHECK.get() is not None:
        return None
    if ends_q.shape[0] != 2 and (q.shape[2] < MANY or longest < LONG):
        _prepare(q, k, ends_q, causal)
        return None
    kernel = _kernels()
    return (
        None
        if kernel is None or kernel.why_not(q, k, v, ends_q)
        else kernel.segment_attention(q, k, v, ends_q, scale, causal=causal)
    )


def _prepare(q: Tensor, k: Tensor, ends: Tensor, causal: bool) -> None:
    """Whoever needs the kernel will not wait for it, or not for long."""
    kernel = _kernels() if q.is_cuda and all(type(size) is int for size in (q.shape[1], k.shape[1], q.shape[3])) else None
    if kernel is not None:
        kernel.prepare(q, k, ends, causal=causal)


def has_kernel(q: Tensor) -> bool:
    """Whether queries like these are attended to by our kernel, if nothing else is against it; they may be traced."""
    kernel = _kernels() if q.is_cuda and q.dim() == 4 else None
    return kernel is not None and kernel.has_warpgroup_products(q.device) and kernel.why_not_heads(q.dtype, q.shape[3]) is None


def _kernels() -> Any:
    """Our kernels for this; None where there are none."""
    from mmqc import kernels

    return importlib.import_module("mmqc.kernels.attention.segment_attention") if kernels.install() else None


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, scale: float | None, causal: bool, longest: int
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q_t, k_t, v_t = (t.transpose(1, 2).squeeze(0).contiguous() for t in (q, k, v))
    window = (-1, 0) if causal else (-1, -1)
    ends_q, ends_k = ends_q.to(torch.int32), ends_k.to(torch.int32)
    y = varlen_attn(q_t, k_t, v_t, ends_q, ends_k, longest, max(longest, 1), scale=scale, window_size=window)
    assert isinstance(y, Tensor)
    return y.contiguous().unsqueeze(0).transpose(1, 2)


def _fake(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, scale: float | None, causal: bool, longest: int
) -> Tensor:
    del ends_k, scale, longest
    _prepare(q, k, ends_q, causal)  # while it is being traced
    batch, heads, length, _ = q.shape
    return q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)


OP = "mmqc_front::scaled_dot_product_attention"
SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor ends_q, Tensor ends_k, float? scale, bool is_causal, SymInt longest) -> Tensor"
)
torch.library.define(OP, SCHEMA, tags=torch.Tag.pt2_compliant_tag)
torch.library.impl(OP, "CompositeExplicitAutograd", reference)
torch.library.register_fake(OP, _fake)
