"""Tokens that may not end an answer yet, in one operation where transformers' processors take ten.

    transformers    arange(vocabulary), isin(it, eos), a copy of all scores, where(eos, -inf, scores);  behind the least length too
    here            scores[:, eos] = -inf;  behind the least length nothing

Why:     64 prompts of Qwen2-VL have 39 MB of scores, and each of the two processors that ``min_new_tokens`` sets reads and writes
         them four times between two tokens.
Exact:   the same numbers, written where the loop has just copied the model's logits to.
Not:     where the logits are collected before they are processed, or another processor than those of ``FUNCTIONAL`` may keep them.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as theirs
from transformers.generation.logits_process import LogitsProcessorList, MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor

__all__ = ["plain_scores"]

# Those that give new scores, and keep none.
FUNCTIONAL = (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    theirs.RepetitionPenaltyLogitsProcessor,
    theirs.TemperatureLogitsWarper,
    theirs.TopKLogitsWarper,
    theirs.TopPLogitsWarper,
    theirs.MinPLogitsWarper,
)


class _NotYet(theirs.LogitsProcessor):
    """No token of ``ends`` in sequences that are shorter than ``least``, prompt and all."""

    def __init__(self, least: int, ends: Tensor) -> None:
        self.least, self.ends = least, ends
        self.known: dict[tuple[Any, int], Tensor] = {}

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[-1] >= self.least:
            return scores
        place = scores.device, scores.shape[-1]
        if place not in self.known:  # ids that no column has say nothing in transformers' way either
            ends = self.ends.flatten().long()
            self.known[place] = ends[(ends >= 0) & (ends < place[1])].to(scores.device)
        return scores.index_fill_(-1, self.known[place], -math.inf)


def plain_scores(given: LogitsProcessorList, config: GenerationConfig) -> LogitsProcessorList:
    """Processors that give the same scores in fewer operations, or those that were given.

    Args:
        given: ``generate``'s, of any kind.
        config: says whether the logits are collected.
    """
    collected = config.return_dict_in_generate and config.output_logits
    if collected or type(given) is not LogitsProcessorList or not all(type(p) in FUNCTIONAL for p in given):
        return given
    return LogitsProcessorList(map(_plain, given))


def _plain(given: Any) -> Any:
    if type(given) is MinLengthLogitsProcessor:
        return _NotYet(given.min_length, given.eos_token_id)
    if type(given) is MinNewTokensLengthLogitsProcessor:
        return _NotYet(given.prompt_length_to_skip + given.min_new_tokens, given.eos_token_id)
    return given
