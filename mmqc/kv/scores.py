"""Queries and keys of one calibration batch, and what rounding the visual keys does to their scores.

    observe(model, batches)         before anything has changed: queries and keys of the floating-point model
    histograms(seen, spec)          once ``spec`` has its tau

Shapes:  q [B, H_q, L, D]   k [B, H, L, D], behind RoPE   scores [H_q, Q, V]: the text tokens behind a sequence's last visual
         token, at most the last 64, against all of its visual tokens
Rounding is the op kv_pack and calibration is kv_attention's own, so that what is drawn is what the cache stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmqc import ops as _ops  # noqa: F401
from mmqc.calibration import observe as observation
from mmqc.config import KVSpec
from mmqc.kv.attention_calls import AttentionCalls
from mmqc.kv.cache import decoder_config
from mmqc.kv.layer_types import kinds_of
from mmqc.nn.eval_mode import evaluating
from mmqc.nn.modality import ModalityContext, attached, visual_token_ids
from mmqc.ops.kv_attention import calibrate
from mmqc.ops.kv_words import unpack_words
from mmqc.report.score_histogram import CALIBRATED, EXACT, ROUNDED, ScoreHistogram

QUERIES, BINS = 64, 60
Batch = Mapping[str, Any]
Operands = tuple[Tensor, Tensor, float]


@dataclass(frozen=True)
class Rows:
    """The tokens of one sequence: int64 places of its visual tokens, and of the queries behind them."""

    visual: Tensor
    queries: Tensor


@dataclass(frozen=True)
class Seen:
    """By layer and sequence: q [H_q, Q, D], the visual k [H, V, D], and the softmax scale; ``rows`` of which sequences."""

    rows: Mapping[int, Rows]
    layers: dict[int, list[Operands]] = field(default_factory=dict)

    def update(self, module: nn.Module, query: Tensor, key: Tensor, scaling: float) -> None:
        """Copy the rows that are looked at."""
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and query.shape[2] == key.shape[2]:
            self.layers[layer] = [(query[b][:, r.queries], key[b][:, r.visual], scaling) for b, r in self.rows.items()]


@torch.no_grad()
def observe(model: nn.Module, batches: Iterable[Batch]) -> Seen:
    """Queries and visual keys of the first batch with text behind an image; nothing where there is no such batch.

    The model is as it was afterwards.

    Raises:
        ConfigError: the model's config names no decoder, or one whose cache cannot be packed.
        ValueError: a batch does not tell visual tokens from text.
    """
    text = decoder_config(model)
    context = attached(model) or ModalityContext(visual_token_ids(model))
    for batch in batches:
        seen = Seen(which(context.find(model, (), batch), batch.get("attention_mask")))
        if seen.rows:
            break
    else:
        return Seen({})
    with evaluating(model), observation.observe(model, {AttentionCalls("sdpa"): seen}):
        model(**{**batch, "use_cache": False})
    kinds = kinds_of(text)
    return Seen(seen.rows, {i: found for i, found in sorted(seen.layers.items()) if kinds[i : i + 1] == ["full_attention"]})


def which(visual: Tensor, mask: Tensor | None) -> dict[int, Rows]:
    """By sequence, the tokens to look at; only sequences that have both kinds."""
    real = torch.ones_like(visual) if mask is None else mask.to(visual.device).bool()
    found: dict[int, Rows] = {}
    for b, (v, r) in enumerate(zip(visual & real, real, strict=True)):
        at = v.nonzero().flatten()
        if len(at):
            behind = r.nonzero().flatten()
            behind = behind[behind > at[-1]][-QUERIES:]
            if len(behind):
                found[b] = Rows(at, behind)
    return found


def histograms(seen: Seen, spec: KVSpec) -> list[ScoreHistogram]:
    """One for each layer that was seen."""
    return [histogram(layer, spec, operands) for layer, operands in seen.layers.items()]


def histogram(layer: int, spec: KVSpec, operands: Sequence[Operands]) -> ScoreHistogram:
    """The scores of all sequences of a layer."""
    tau = spec.tau_of(layer)
    spec = spec.of_layer(layer)
    found = [scores(q, k, t, spec, tau) for q, k, t in operands]
    kinds = (EXACT, ROUNDED, CALIBRATED) if tau != (0.0, 0.0) else (EXACT, ROUNDED)
    flat = {kind: torch.cat([s[kind].flatten() for s in found]) for kind in kinds}
    low, high = (float(f(torch.stack([f(x) for x in flat.values()]))) for f in (torch.min, torch.max))
    counts = {kind: [int(n) for n in torch.histc(x.double(), BINS, low, high)] for kind, x in flat.items()}
    error = {}
    for kind in kinds[1:]:
        squares = [(s[kind].softmax(-1) - s[EXACT].softmax(-1)).square().flatten() for s in found]
        error[kind] = float(torch.cat(squares).mean())
    return ScoreHistogram(layer, spec.bits, low, high, counts, error, tau)


def scores(q: Tensor, k: Tensor, scaling: float, spec: KVSpec, tau: tuple[float, float]) -> dict[str, Tensor]:
    """By kind, the scores [H_q, Q, V] of one sequence, in float32 or q's wider dtype."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tokens = torch.arange(k.shape[1], device=k.device)[None]
    count = torch.full((1,), k.shape[1], dtype=torch.int32, device=k.device)
    words, scale, offset = torch.ops.mmqc.kv_pack(k[None], tokens, count, spec.bits, spec.keys, spec.shrink_keys, False)
    codes = unpack_words(words, spec.bits)[:, :, : k.shape[1]].to(wide)
    rounded = (codes * scale + offset)[0]
    group = q.shape[0] // k.shape[0]
    exact, packed = (scaling * (q.to(wide) @ x.to(wide).repeat_interleave(group, 0).mT) for x in (k, rounded))
    used = torch.ones_like(packed, dtype=torch.bool)
    return {EXACT: exact, ROUNDED: packed, CALIBRATED: calibrate(packed, used, *tau)}
