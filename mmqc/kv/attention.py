"""The attention function that reads a packed cache; with any other cache it is transformers' sdpa.

    prefill     exact attention among the new tokens, which are packed and stored afterwards
    decode      the new token is stored, then the op kv_attention reads packed and plain tokens
    a chunk     new tokens behind cached ones (a second turn): both kinds of attention, merged by their log-sum-exp:
                y = sum_i y_i exp(lse_i - lse),   lse = log sum_i exp(lse_i)

Shapes:  query [B, H_q, L, D]   key, value: ``Cached`` handles from PackedLayer.update   y [B, L, H_q, D]
"""

# transformers declares a layer's tensors as `Tensor | None`, and index tensors as LongTensor.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false, reportReturnType=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mmqc import kernels
from mmqc import ops as _ops  # noqa: F401
from mmqc.kv.layer import ATTENTION, PADDING, TEXT, VISUAL, Arrival, Cached, PackedLayer, Segment
from mmqc.kv.query_moment import moment_of
from mmqc.traced import is_traced

Attended = tuple[Tensor, Tensor]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention interface of transformers."""
    if not isinstance(key, Cached):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    y = attend_and_store(module, key.layer, query, key.states, value.states, attention_mask, scaling, **kwargs)
    key.layer.leave()
    return y, None


def attend_and_store(
    module: nn.Module, layer: PackedLayer, query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> Tensor:
    """The output of one of the three cases; the new tokens are then in the cache."""
    if layer.empty:
        y, _ = sdpa_attention_forward(module, query, k, v, mask, scaling=scaling, **kwargs)
        came = keep(module, layer, mask, k, v)
        if layer.shared.cut is not None:
            y = as_if_decoded(layer, came, y, query, k, v, mask, scaling, layer.shared.cut)
        return y
    if query.shape[2] == 1:
        layer.append(k, v)
        return over_cache(layer, query, scaling)[0].transpose(1, 2)
    seen = visible(mask, query.shape[2], k)
    parts = (over_cache(layer, query, scaling), attend(query, k, v, seen, scaling))
    keep(module, layer, mask, k, v)
    return merge(*parts)[0].transpose(1, 2)


def _keep(module: nn.Module, layer: PackedLayer, mask: Tensor | None, k: Tensor, v: Tensor) -> Arrival:
    """Store a prompt; returns what it brought."""
    came = arrival(layer, mask, k)
    layer.store(k, v, came, moment_of(module))
    return came


# Never in a graph: it depends on the tokens what is allocated, and a compiler makes one of tensors that are equal at first,
# such as the counters of all layers, each of which is written to later.
keep: Any = torch.compiler.disable(_keep)


def arrival(layer: PackedLayer, mask: Tensor | None, k: Tensor) -> Arrival:
    """What the new tokens are; looked at by the first layer, for all of them."""
    shared = layer.shared
    came = shared.arrival
    if layer.first or came is None:
        batch, length = k.shape[0], k.shape[2]
        visual = shared.context.visual
        kinds = torch.full((batch, length), TEXT, dtype=torch.uint8, device=k.device)
        if visual is not None:
            kinds = kinds.masked_fill(visual.to(k.device), VISUAL)
        if mask is not None:  # the last query sees every token but padding
            seen = mask[:, 0, -1, -length:]
            seen = seen if seen.dtype == torch.bool else seen == 0
            kinds = kinds.masked_fill(~seen.expand(batch, -1), PADDING)
        came = shared.arrival = Arrival.of(kinds)
        if not is_traced():
            shared.history.append((0 if layer.empty else int(layer.cumulative_length), kinds))
    return came


def over_cache(layer: PackedLayer, query: Tensor, scaling: float) -> Attended:
    """Attention to all that is stored; with several segments, to each, the text along with the first."""
    k_text, v_text, text_count = layer.window()
    found: Attended | None = None
    for segment in layer.segments or [nothing(layer)]:
        s = segment
        tau = layer.tau if layer.segments else (0.0, 0.0)
        part = torch.ops.mmqc.kv_attention(
            query,
            s.k_words,
            s.v_words,
            s.k_scale,
            s.k_offset,
            s.v_scale,
            s.v_offset,
            s.count,
            k_text,
            v_text,
            text_count,
            layer.spec.bits,
            scaling,
            *tau,
        )
        found = part if found is None else merge(found, part)
        k_text, v_text, text_count = k_text[:, :, :0], v_text[:, :, :0], torch.zeros_like(text_count)
    assert found is not None
    return found if layer.older is None else merge(found, over_older(layer, query, scaling))


def over_older(layer: PackedLayer, query: Tensor, scaling: float) -> Attended:
    """Attention to the rounded text tokens."""
    assert layer.older is not None
    parts = [t[:, :, 1:] for t in layer.older.tensors().values()]
    count = (layer.text_count - layer.spec.text_window).clamp(min=0)
    return torch.ops.mmqc.kv_token_attention(query, *parts, count, layer.older.bits, scaling)


def nothing(layer: PackedLayer) -> Segment:
    """A segment without tokens."""
    shape, device = layer.keys.shape[:2], layer.keys.device  # in a compiled step, ``batch_size`` would be a constant
    k_words = torch.empty((*shape, 0, layer.k_head_dim), dtype=torch.int16, device=device)
    v_words = torch.empty((*shape, layer.v_head_dim, 0), dtype=torch.int16, device=device)
    k_one, v_one = (torch.ones((*shape, 1, d), device=device) for d in (layer.k_head_dim, layer.v_head_dim))
    return Segment(k_words, k_one, k_one, v_words, v_one, v_one, torch.zeros_like(layer.text_count))


def as_if_decoded(
    layer: PackedLayer, came: Arrival, y: Tensor, query: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, cut: int
) -> Tensor:
    """A prefill whose tokens from ``cut`` on see packed visual tokens, as generated ones do: for the search for tau."""
    rows, none = query[:, :, cut:], torch.zeros_like(layer.text_count)
    s = (layer.segments or [nothing(layer)])[0]
    visual = torch.ops.mmqc.kv_attention(
        rows,
        s.k_words,
        s.v_words,
        s.k_scale,
        s.k_offset,
        s.v_scale,
        s.v_offset,
        s.count,
        k[:, :, :0],
        v[:, :, :0],
        none,
        layer.spec.bits,
        scaling,
        *layer.tau,
    )
    seen = visible(mask, query.shape[2], k)[:, :, cut:] & (came.kinds != VISUAL)[:, None, None]
    rest = merge(visual, attend(rows, k, v, seen, scaling))[0].transpose(1, 2)
    return torch.cat((y[:, :cut], rest), 1)


def visible(mask: Tensor | None, length: int, k: Tensor) -> Tensor:
    """Which of the new tokens each of them sees, bool [B, 1, L, L]."""
    if mask is None:
        return torch.ones(length, length, dtype=torch.bool, device=k.device).tril()[None, None]
    seen = mask[..., -length:]
    return seen if seen.dtype == torch.bool else seen == 0


def attend(query: Tensor, k: Tensor, v: Tensor, seen: Tensor, scaling: float) -> Attended:
    """Exact attention and its log-sum-exp; seen bool [B, 1, Q, L]."""
    (batch, q_heads, length, _), heads = query.shape, k.shape[1]
    grouped = query.reshape(batch, heads, q_heads // heads, length, -1)
    scores = scaling * (grouped @ k[:, :, None].mT).to(torch.promote_types(k.dtype, torch.float32))
    scores = scores.masked_fill(~seen[:, :, None], -torch.inf)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - torch.where(lse.isfinite(), lse, 0.0)[..., None])
    y = p.to(v.dtype) @ v[:, :, None]
    return y.reshape(batch, q_heads, length, -1), lse.reshape(batch, q_heads, length)


def merge(a: Attended, b: Attended) -> Attended:
    """Attention to two sets of tokens as attention to both."""
    lse = torch.logaddexp(a[1], b[1])
    top = torch.where(lse.isfinite(), lse, 0.0)
    y = sum(y * torch.exp(part - top)[..., None] for y, part in (a, b))
    assert isinstance(y, Tensor)
    return y.to(a[0].dtype), lse


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
kernels.install()
