"""Which rows of a step are visual, in one buffer that CUDA graphs can hold.

    mask[t] = ids[t] in visual_token_ids        noted where the token ids become embeddings, in front of every graph

Shapes:  ids int64 [T]   mask bool [rows], whose first T are the step's

vLLM embeds the tokens of a step of a multimodal model, placeholders of images among them, before it runs or replays the decoder, in
either of its model runners; mmqc found the scales with the same ids.  Rows that a graph is padded with have what an earlier step
left: nothing reads their outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.vllm.specs import PluginError


class VisualRows(nn.Module):
    """The buffer; ``noted`` once an embedding writes to it."""

    mask: Tensor

    def __init__(self, rows: int, ids: Sequence[int]) -> None:
        super().__init__()
        self.ids = tuple(ids)
        self.noted = False
        self.register_buffer("mask", torch.zeros(rows, dtype=torch.bool), persistent=False)

    def watch(self, embedding: nn.Module, vocabulary: int, others: Sequence[int] = ()) -> None:
        """Note the ids that ``embedding`` is called with.

        Args:
            embedding: the language model's.
            vocabulary: how many ids it has.
            others: what else stands for something in the model: where one is none of the vocabulary's, vLLM hides all.

        Raises:
            PluginError: vLLM does not hand on the ids of images.
        """
        largest = max((*self.ids, *others), default=0)
        if largest >= vocabulary:
            raise PluginError(
                f"token {largest} stands for an input and is not among the {vocabulary} that are embedded, so that vLLM hides such "
                "tokens from the embedding: quantize without a scale per modality (mquant(msq=False))"
            )
        embedding.register_forward_pre_hook(self.note, with_kwargs=True)
        self.noted = True

    @torch.no_grad()
    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Forward pre-hook of the embedding."""
        del module
        ids: Tensor = (args[0] if args else next(iter(kwargs.values()))).reshape(-1)
        visual = torch.zeros_like(ids, dtype=torch.bool)
        for token in self.ids:
            visual = visual | (ids == token)
        self._fits(len(ids))
        self.mask[: len(ids)].copy_(visual)

    def rows(self, x: Tensor) -> Tensor:
        """The mask of x [..., K]."""
        rows = x.shape[:-1]
        self._fits(rows.numel())
        return self.mask[: rows.numel()].view(rows)

    def _fits(self, rows: int) -> None:
        if rows > len(self.mask):
            raise PluginError(f"a step of {rows} tokens, and room for the modalities of {len(self.mask)}: --max-num-batched-tokens")
