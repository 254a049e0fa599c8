"""Log-probabilities of the right answers' tokens; needs torch alone, so that every environment reads the same questions alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def answers(model: Any, batches: list[dict[str, Any]]) -> list[Tensor]:
    """log p [T, V] of each question, in the questions' order.

    Args:
        model: returns ``logits`` [B, S, V].
        batches: of questions with answers of one length: "inputs", "numbers" of the questions and "size" of the answers, in tokens.
    """
    found: dict[int, Tensor] = {}
    for batch in batches:
        logits, size = model(**batch["inputs"], use_cache=False).logits, batch["size"]
        for number, row in zip(batch["numbers"], logits, strict=True):
            found[number] = row[-size - 1 : -1].double().log_softmax(-1)
    return [found[number] for number in sorted(found)]


def scores(found: list[Tensor], exact: list[Tensor], ids: list[Tensor]) -> dict[str, list[float]]:
    """Of each question the mean NLL of its answer's tokens, and the mean divergence from the float model at them."""
    return {
        "nll": [-float(q.gather(1, right[:, None]).mean()) for q, right in zip(found, ids, strict=True)],
        "kl": [float((p.exp() * (p - q)).sum(1).mean()) for p, q in zip(exact, found, strict=True)],
    }
