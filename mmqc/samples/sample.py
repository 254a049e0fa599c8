"""A sample: a trained model with all that is needed to quantize it and to say what that cost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from mmqc.samples import checkpoint, handwriting, pairs, scoring, stress
from mmqc.samples.docs import alphabet, place
from mmqc.samples.docs import checkpoint as docs_checkpoint
from mmqc.samples.docs import questions as docs_questions
from mmqc.samples.processor import CharTokenizer, DigitsProcessor
from mmqc.samples.questions import Question, questions

if TYPE_CHECKING:
    from transformers import Qwen2VLForConditionalGeneration

QUESTIONS = {"digits-vqa": 640, "digits-vqa-stress": 640, "docs-vqa": 450}
DOCS = "docs-vqa"
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
        if name == DOCS:
            return cls(name, docs_checkpoint.load(place.folder("config.json")), docs_processor())
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
        """The first `n` questions of the evaluation (all: 640; of docs-vqa 450); every prefix holds the kinds in equal numbers."""
        return self._asked("test", _TEST_SEED, QUESTIONS[self.name] if n is None else n)

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

    def pairs(
        self,
        first: Any,
        second: Any,
        n: int | None = None,
        scores: tuple[list[scoring.Score], list[scoring.Score]] | None = None,
        cached: bool = False,
    ) -> list[pairs.Pair]:
        """What `second` changed on each of `questions(n)`.

        Args:
            first: The model to compare with.
            second: Another of the sample's.
            n: How many questions; all by default.
            scores: Those of both models, where they are known.
            cached: NLL and KL by decoding through the cache, where `second` packs it (`scoring.answer_log_probs`).
        """
        asked = self.questions(n)
        before, after = scores or (self.scores(first, n), self.scores(second, n))
        found: dict[int, pairs.Pair] = {}
        for index in scoring.groups(asked, self.processor.patch):
            batch = [asked[i] for i in index]
            both = (scoring.answer_log_probs(model, self.processor, batch, cached) for model in (first, second))
            for i, q, p1, p2 in zip(index, batch, *both, strict=True):
                ids = torch.tensor([*self.processor.tokenizer.encode(q.answer), alphabet.END])[:, None]
                nll = tuple(-float(p.gather(1, ids).double().mean()) for p in (p1, p2))
                found[i] = pairs.Pair(q.kind, (before[i].accuracy, after[i].accuracy), nll, *pairs.divergence(p1, p2))
        return [found[i] for i in range(len(asked))]

    def _calibration_questions(self, n: int) -> list[Question]:
        return self._asked("calibration", _CALIBRATION_SEED, n)

    def _asked(self, split: str, seed: int, n: int) -> list[Question]:
        hand = handwriting.load_split(split)
        if self.name == DOCS:
            return [docs_questions.question(seed, i, hand) for i in range(n)]
        return list(islice(questions(hand, seed), n))


def docs_processor() -> DigitsProcessor:
    """The processor of docs-vqa: its own characters, patches of 8 pixels."""
    return DigitsProcessor(CharTokenizer(alphabet.CHARACTERS, alphabet.VOCAB_SIZE), alphabet.PATCH)
