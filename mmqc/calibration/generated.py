"""Calibration text that the model wrote itself: each batch is continued greedily by the floating-point model.

    input_ids [B, L]  ->  input_ids ++ the next n tokens [B, L + n]

Why:     activations of answers are not those of prompts, and static scales have to fit both.
Source:  LLM-QAT (arXiv:2305.17888, section 3.1) trains on text that its own model generated, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmqc.calibration.calibrate import CalibrationError

POSITIONS = ("position_ids", "cache_position")


@torch.no_grad()
def with_generated(
    model: nn.Module, batch: Mapping[str, Any], tokens: int, visual_token_ids: tuple[int, ...] = ()
) -> dict[str, Any]:
    """``batch`` and at most ``tokens`` greedy tokens behind it; fewer if the model ends its answer.

    Args:
        model: with transformers' ``generate``.
        batch: with ``input_ids`` [B, L], not padded on the right; other tensors of this shape grow along: the attention mask
            with ones, kinds of tokens with zeros (text).
        tokens: how many.
        visual_token_ids: ids that no text may hold.

    Raises:
        CalibrationError: the batch cannot be continued.
    """
    ids = batch.get("input_ids")
    if not hasattr(model, "generate") or not isinstance(ids, Tensor):
        raise CalibrationError("generate_tokens needs a model with a generate method, and batches with input_ids")
    given = [name for name in POSITIONS if batch.get(name) is not None]
    if given:
        raise CalibrationError(f"generate_tokens cannot continue a batch with {given[0]}: leave it to the model")
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask[:, -1].all()):
        raise CalibrationError("generate_tokens needs batches that are padded on the left, or batches of one")
    more = {"suppress_tokens": list(visual_token_ids)} if visual_token_ids else {}
    generate: Any = model.generate
    own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}  # some write into it
    out = generate(**own, max_new_tokens=tokens, do_sample=False, num_beams=1, **more)
    new = out[:, ids.shape[1] :]
    grown: dict[str, Any] = {**batch, "input_ids": torch.cat((ids, new), 1)}
    for name, value in batch.items():
        if name != "input_ids" and isinstance(value, Tensor) and value.shape == ids.shape:
            grown[name] = F.pad(value, (0, new.shape[1]), value=1 if name == "attention_mask" else 0)
    return grown
