"""Questions that models are asked and compared on: a user's own, a sample's, or none where only text is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqc.cli import evaluation
from mmqc.cli.chat_data import Example, encode, read_examples
from mmqc.kv.cache import SPEC
from mmqc.samples import pairs
from mmqc.samples.scoring import Score, recovery, summarize

if TYPE_CHECKING:
    from mmqc.samples.sample import Sample

NOISE_EXAMPLES = 8
Outcomes = list[evaluation.Answer] | list[Score]


class Asked:
    """The questions; an answer's outcome is an `evaluation.Answer`, or of a sample its `Score`.

    Args:
        processor: Of the models, which share it.
        sample: Whose questions are taken without ``data``.
        data: A folder with data.jsonl, or a jsonl file.
        count: How many questions; None: all.
        max_new_tokens: Of an answer to a question of ``data``.
    """

    def __init__(self, processor: Any, sample: Sample | None, data: Path | None, count: int | None, max_new_tokens: int) -> None:
        self.processor, self.count, self.max_new_tokens = processor, count, max_new_tokens
        self.sample = sample if data is None else None
        self.examples: Sequence[Example] = [] if data is None else read_examples(data, count)

    def ask(self, model: Any) -> Outcomes:
        """Every question's outcome with a model."""
        if self.sample is not None:
            return self.sample.scores(model, self.count)
        return evaluation.ask(model, self.processor, self.examples, self.max_new_tokens)

    def summary(self, outcomes: Any) -> dict[str, float]:
        """Means: accuracy, NLL, and what else there is."""
        if not outcomes:
            return {}
        return summarize(outcomes) if self.sample is not None else evaluation.summary(outcomes)

    def pairs(self, first: Any, second: Any, before: Any, after: Any) -> list[pairs.Pair]:
        """What the second model changed, whose outcomes by both are known."""
        if self.sample is not None:
            packed = any(SPEC in vars(model) for model in (first, second) if hasattr(model, "__dict__"))
            return self.sample.pairs(first, second, self.count, (before, after), cached=packed)
        return evaluation.pairs(first, second, self.processor, self.examples, before, after)

    def compared(self, found: list[pairs.Pair], before: Any, after: Any) -> dict[str, Any]:
        """The paired figures and the recovery."""
        if not found:
            return {}
        if self.sample is None:
            return evaluation.compared(before, after) | pairs.compared(found, alike=False)
        first, second = (self.summary(outcomes)["accuracy"] for outcomes in (before, after))
        return pairs.compared(found) | {"recovery": recovery(first, second)}

    def noise(self, first: Any, second: Any) -> dict[str, float]:
        """SQNR of the second model's logits in dB, at visual and at text positions of a few questions."""
        if self.sample is not None:
            batches = self.sample.calibration(NOISE_EXAMPLES)
        else:
            batches = [encode(self.processor, example, answer=True) for example in self.examples[:NOISE_EXAMPLES]]
        return {f"SQNR {name}, dB": value for name, value in evaluation.logit_sqnr(first, second, batches).items()}
