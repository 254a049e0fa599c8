"""Row weights with which the words of calibration count as much as its images, all in all.

    weight of text = visual tokens / other tokens, of all batches         weight of visual = 1

Why:     a picture has more tokens than what is asked and answered about it (docs-vqa: 288 and 51), so a solver that minimises the
         error of all rows spends most of what it can choose on visual ones; what a model answers depends on the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.calibration.calibrate import TEXT, VISUAL, CalibrationError
from mmqc.nn.modality import visual_token_ids


def balanced_weights(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What rows of text count, those of visual tokens being 1.

    What ``attention_mask`` [B, T] hides is not counted, nor what ``generate_tokens`` appends.

    Raises:
        CalibrationError: the model's config names no visual token, a batch has no ``input_ids``, or one of the two never comes.
    """
    visual, ids = visual_token_ids(model), dict.fromkeys((VISUAL, TEXT), 0)
    if not visual:
        raise CalibrationError(f"modality_weights='balanced': the config of {type(model).__name__} names no image or video token")
    for i, batch in enumerate(batches):
        tokens, shown = batch.get("input_ids"), batch.get("attention_mask")
        if not isinstance(tokens, Tensor):
            raise CalibrationError(f"modality_weights='balanced': calibration batch {i} has no input_ids to count")
        if isinstance(shown, Tensor) and shown.shape == tokens.shape:
            tokens = tokens[shown.to(tokens.device).bool()]
        found = int(torch.isin(tokens, torch.tensor(visual, device=tokens.device)).sum())
        ids[VISUAL] += found
        ids[TEXT] += tokens.numel() - found
    absent = next((name for name, count in ids.items() if not count), None)
    if absent is not None:
        raise CalibrationError(f"modality_weights='balanced': no batch of calibration has a {absent} token; leave it out")
    return {TEXT: ids[VISUAL] / ids[TEXT]}
