"""Whether a sequence is at its end, in one operation where transformers' criteria take eight.

    transformers    full(False) | full(length reached) | isin(last token, eos)     and  token * unfinished + pad * (1 - unfinished)
    here            last token == eos                                              and, for one sequence, nothing

Why:     each of those operations is a launch of its own between two tokens.
Exact:   for a maximal length and tokens that end a sequence, the two criteria that ``generate`` sets itself.  What a finished
         sequence goes on with is padding where others are unfinished; one sequence alone ends the loop instead.
Not:     other criteria: with one of them all stay transformers' own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

__all__ = ["plain_stops"]


class _PlainStops(StoppingCriteriaList):
    """A length and some tokens; what iterates over it sees transformers' criteria, but for one sequence not those tokens."""

    def __init__(self, given: StoppingCriteriaList, sequences: int) -> None:
        super().__init__(c for c in given if sequences > 1 or isinstance(c, MaxLengthCriteria))
        self.lengths = [c for c in given if isinstance(c, MaxLengthCriteria)]
        self.ends = [c for c in given if isinstance(c, EosTokenCriteria)]
        self.none: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any = None, **kwargs: Any) -> Any:
        if kwargs or not self._inside(input_ids.shape[1]):
            return StoppingCriteriaList([*self.lengths, *self.ends])(input_ids, scores, **kwargs)
        found = [_ends(criterion, input_ids[:, -1]) for criterion in self.ends]
        if found:
            return functools.reduce(torch.logical_or, found)
        if self.none is None:
            self.none = input_ids.new_zeros(input_ids.shape[0], dtype=torch.bool)
        return self.none

    def _inside(self, length: int) -> bool:
        """Whether no criterion of length has anything to say, not even a warning."""
        most = (c.max_position_embeddings for c in self.lengths)
        return all(length < c.max_length for c in self.lengths) and all(m is None or length <= m for m in most)


def _ends(criterion: EosTokenCriteria, last: Tensor) -> Tensor:
    tokens = criterion.eos_token_id = criterion.eos_token_id.to(last.device)
    return last == tokens if tokens.numel() == 1 else torch.isin(last, tokens)


def plain_stops(given: StoppingCriteriaList, sequences: int) -> StoppingCriteriaList:
    """Criteria that say the same in fewer operations, or those that were given.

    Args:
        given: ``generate``'s, of any kind.
        sequences: B, how many are generated.
    """
    known = all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in given)
    return _PlainStops(given, sequences) if type(given) is StoppingCriteriaList and known else given
