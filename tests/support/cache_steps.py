"""A cache step by step, and transformers' own cache with its visual tokens rounded by hand."""

from typing import Any

import torch
from models import IMAGE
from torch import Tensor
from transformers import DynamicCache

from mmqc import KVSpec


def rounded(x: Tensor, spec: KVSpec, shrink: float, by_token: bool = False) -> Tensor:
    """[tokens, D] of one head, rounded to 2^bits levels of the narrowed range."""
    axis = 1 if by_token else 0
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    centre, half = (low + high) / 2, (high - low) / 2 * shrink
    step = 2 * half / (2**spec.bits - 1)
    return ((x - centre + half) / step).clamp(0, 2**spec.bits - 1).round() * step + centre - half


def round_visual(cache: DynamicCache, visual: Tensor, spec: KVSpec, start: int = 0) -> None:
    """Round what a call with this mask [B, L] stored from ``start`` on."""
    for i, layer in enumerate(cache.layers):
        own = spec.of_layer(i)
        for b in range(visual.shape[0]):
            at = start + visual[b].nonzero()[:, 0]
            for h in range(layer.keys.shape[1]) if len(at) else ():
                layer.keys[b, h, at] = rounded(layer.keys[b, h, at], own, own.shrink_keys)
                layer.values[b, h, at] = rounded(layer.values[b, h, at], own, own.shrink_values, own.values == "token")


def steps(model: Any, cache: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of tokens [B, n] fed one by one."""
    out = []
    for i in range(tokens.shape[1]):
        at = int(cache.get_seq_length())
        position = torch.full((3, tokens.shape[0], 1), at)
        kept = None if mask is None else torch.cat((mask, torch.ones(mask.shape[0], i + 1, dtype=mask.dtype)), 1)
        out.append(
            model(
                input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True, position_ids=position, attention_mask=kept
            ).logits
        )
    return torch.cat(out, 1)


def padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The prompt, and one without its first words and with padding there; both have the images."""
    ids = batch["input_ids"].repeat(2, 1)
    ids[1, :5] = 0
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": batch["pixel_values"].repeat(2, 1),
        "image_grid_thw": batch["image_grid_thw"].repeat(2, 1),
    }
