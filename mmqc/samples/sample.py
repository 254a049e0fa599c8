"""A sample: a trained model with all that is needed to quantize it and to say what that cost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from mmqc.samples import checkpoint, handwriting, scoring, stress
from mmqc.samples.processor import DigitsProcessor
from mmqc.samples.questions import Question, questions

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2VLForConditionalGeneration

QUESTIONS = 640
_CALIBRATION_SEED, _TEST_SEED = 1, 2


@dataclass
class Sample:
    """A trained model, its processor, calibration batches from one set of scans and questions from another."""

    name: str
    model: Qwen2VLForConditionalGeneration
    processor: DigitsProcessor

    @classmethod
    def load(cls, name: str) -> Sample:
        """The sample of that name; `mmqc.samples.load` checks the name."""
        model = checkpoint.load()
        if name == "digits-vqa-stress":
            model = stress.stress(model).float()
        return cls(name, model, DigitsProcessor())

    def calibration(self, n: int) -> list[dict[str, torch.Tensor]]:
        """`n` batches of one prompt with its answer, all kinds of question in turn, no labels."""
        return [self.processor(q.prompt, q.images, answer=q.answer) for q in self._calibration_questions(n)]

    def prompts(self, n: int) -> list[dict[str, torch.Tensor]]:
        """The prompts of `calibration(n)` without their answers, for `model.generate(**prompt)`."""
        return [self.processor(q.prompt, q.images) for q in self._calibration_questions(n)]

    def questions(self, n: int | None = None) -> list[Question]:
        """The first `n` questions of the evaluation (all: 640); every prefix holds the kinds in equal numbers."""
        return list(islice(questions(handwriting.load_split("test"), _TEST_SEED), QUESTIONS if n is None else n))

    def scores(self, model: Any, n: int | None = None) -> list[scoring.Score]:
        """What `model` answers to each of `questions(n)`, with that question's accuracy and NLL."""
        return scoring.score(model, self.processor, self.questions(n))

    def evaluate(self, model: Any, n: int | None = None) -> dict[str, float]:
        """Accuracy and mean NLL of the right answer's tokens, over all kinds and for each ("accuracy", "nll/row").

        "accuracy" is the mean over the kinds of exact match (short answers) or of digits right (transcriptions).
        """
        return scoring.summarize(self.scores(model, n))

    def compare(self, model_a: Any, model_b: Any, n: int | None = None) -> scoring.Comparison:
        """Accuracy of `model_b` minus that of `model_a` on the same questions, with a bootstrap 95 % interval."""
        return scoring.compare(self.scores(model_a, n), self.scores(model_b, n))

    @staticmethod
    def _calibration_questions(n: int) -> list[Question]:
        return list(islice(questions(handwriting.load_split("calibration"), _CALIBRATION_SEED), n))
