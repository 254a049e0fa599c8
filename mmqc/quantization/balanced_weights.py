"""Row weights with which the words of calibration count as much as its images, all in all, where these have more tokens.

    weight of text = max(1, 2^round(log2(visual tokens / other tokens))), of all batches         weight of visual = 1

Why:     a picture has more tokens than what is asked and answered about it (docs-vqa: 288 and 51), so a solver that minimises the
         error of all rows spends most of what it can choose on visual ones; what a model answers depends on the others.
         Where words are the more, they stay so: a weight of a half moved answers no further than another draw of batches does.
         A power of two: products that are weighted by it round no more than others, so sums of several processes stay what one
         process has (ADR 31).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.calibration.calibrate import TEXT, VISUAL
from mmqc.nn.modality import visual_token_ids


def balanced_weights(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, float] | str:
    """What rows of text count, those of visual tokens being 1; or why that cannot be said.

    What ``attention_mask`` [B, T] hides is not counted, nor what ``generate_tokens`` appends.
    """
    visual, ids = visual_token_ids(model), dict.fromkeys((VISUAL, TEXT), 0)
    if not visual:
        return f"the config of {type(model).__name__} names no image or video token"
    for i, batch in enumerate(batches):
        tokens, shown = batch.get("input_ids"), batch.get("attention_mask")
        if not isinstance(tokens, Tensor):
            return f"calibration batch {i} has no input_ids to count"
        if isinstance(shown, Tensor) and shown.shape == tokens.shape:
            tokens = tokens[shown.to(tokens.device).bool()]
        found = int(torch.isin(tokens, torch.tensor(visual, device=tokens.device)).sum())
        ids[VISUAL] += found
        ids[TEXT] += tokens.numel() - found
    absent = next((name for name, count in ids.items() if not count), None)
    if absent is not None:
        return f"no batch of calibration has a {absent} token"
    return {TEXT: max(1.0, 2.0 ** round(math.log2(ids[VISUAL] / ids[TEXT])))}
