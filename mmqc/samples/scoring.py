"""How well a model answers: greedy answers and the NLL of the right ones, question by question.

Both come from the model's public `forward` and `generate`, so quantized and compiled models are scored the same way.
Questions of similar length share a batch; a batch is padded on the left and stops when its last answer has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmqc.samples.processor import END, DigitsProcessor
from mmqc.samples.questions import TRANSCRIPTIONS, Question

BATCH, BATCH_TOKENS = 32, 8192
READINGS = ("line", "text", "page", "photo")  # of docs-vqa
DRAWS, SEED = 2000, 0


@dataclass(frozen=True)
class Score:
    """One question's outcome: `accuracy` in 0..1, `nll` per token of the right answer (its end included)."""

    kind: str
    answer: str
    right: str
    accuracy: float
    nll: float


@dataclass(frozen=True)
class Interval:
    """A mean and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """E.g. "-0.013 [-0.040, 0.013]"."""
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def bootstrap(*groups: Sequence[float] | np.ndarray, draws: int = DRAWS, seed: int = SEED) -> Interval:
    """The mean of the groups' means and its percentile interval, values drawn with replacement within each group.

    For a paired difference pass the differences, question by question (Efron and Tibshirani 1993, chapter 13).
    """
    data = [np.asarray(values, dtype=np.float64) for values in groups]
    rng = np.random.default_rng(seed)
    means = np.mean([d[rng.integers(len(d), size=(draws, len(d)))].mean(1) for d in data], axis=0)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(np.mean([d.mean() for d in data])), float(low), float(high))


def tail_nll(logits: torch.Tensor, ids: torch.Tensor, size: int) -> float:
    """Mean NLL of the last ``size`` tokens of ``ids`` [T] by ``logits`` [T, V], under teacher forcing."""
    start = len(ids) - size
    return torch.nn.functional.cross_entropy(logits[start - 1 : -1].double(), ids[start:]).item()


def recovery(reference: float, accuracy: float) -> float:
    """Accuracy as a share of the reference's; NaN where that is 0."""
    return accuracy / reference if reference else math.nan


@dataclass(frozen=True)
class Comparison:
    """Accuracy of b minus accuracy of a over the same questions, and its bootstrap 95 % interval."""

    a: float
    b: float
    difference: float
    low: float
    high: float


def accuracy(kind: str, answer: str, right: str) -> float:
    """Exact match; for digits that were copied the share that stands where it should, for text that was read `anls`."""
    if kind in READINGS:
        return anls(answer, right)
    if kind not in TRANSCRIPTIONS:
        return float(answer == right)
    hits = [i < len(answer) and answer[i] == c for i, c in enumerate(right) if c.isdigit()]
    return sum(hits) / len(hits)


def anls(answer: str, right: str) -> float:
    """1 less the edit distance over the longer text's length; 0 where half of it or more is wrong (Biten et al. 2019, eq. 1)."""
    row = list(range(len(right) + 1))
    for i, c in enumerate(answer, 1):
        last, row = row, [i]
        for j, d in enumerate(right, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (c != d)))
    similar = 1 - row[-1] / max(len(answer), len(right), 1)
    return similar if similar > 0.5 else 0.0


@torch.no_grad()
def answer_log_probs(model: Any, processor: DigitsProcessor, batch: Sequence[Question], cached: bool = False) -> list[torch.Tensor]:
    """log p [T, V] at each right answer's tokens, its end included, in float32 on the CPU.

    Args:
        model: Of the sample, or made of it.
        processor: The sample's.
        batch: Questions that fit into one batch.
        cached: Decode token by token through the model's own cache, as `generate` does, where that cache is what is measured;
            else all tokens in one pass.
    """
    sizes = [len(q.answer) + 1 for q in batch]
    if cached:
        inputs = to_device(processor.collate([processor(q.prompt, q.images) for q in batch], multiple_of=16), model)
        wanted = torch.full((len(batch), max(sizes)), END)
        for row, q in zip(wanted, batch, strict=True):
            row[: len(q.answer)] = torch.tensor(processor.tokenizer.encode(q.answer))
        rows = [logits[:size] for logits, size in zip(forced_logits(model, inputs, wanted), sizes, strict=True)]
    else:
        inputs = processor.collate([processor(q.prompt, q.images, answer=q.answer) for q in batch], multiple_of=16)
        logits = model(**to_device(inputs, model), use_cache=False).logits
        rows = [row[-size - 1 : -1] for row, size in zip(logits, sizes, strict=True)]
    return [row.double().log_softmax(-1).float().cpu() for row in rows]


@torch.no_grad()
def forced_logits(model: Any, inputs: dict[str, torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of `generate` on its way through the tokens `wanted` [B, T]; fewer, where all rows end before T."""
    from transformers import LogitsProcessorList

    def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        now = wanted[:, input_ids.shape[1] - start, None].to(scores.device)
        return torch.full_like(scores, -math.inf).scatter(1, now, 0.0)

    start = inputs["input_ids"].shape[1]
    made = model.generate(
        **inputs,
        max_new_tokens=wanted.shape[1],
        do_sample=False,
        logits_processor=LogitsProcessorList([force]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(made.logits, 1)


def to_device(batch: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """The batch where the model's first parameter or buffer is."""
    held = next(iter(model.parameters()), None)
    device = held.device if held is not None else next(iter(model.buffers())).device
    return {name: value.to(device) for name, value in batch.items()}


@torch.no_grad()
def answer_nll(model: Any, processor: DigitsProcessor, batch: Sequence[Question]) -> list[float]:
    """Mean NLL of each right answer's tokens under teacher forcing."""
    inputs = processor.collate([processor(q.prompt, q.images, answer=q.answer) for q in batch], multiple_of=16)
    inputs = to_device(inputs, model)
    logits = model(**inputs, use_cache=False).logits
    sizes = [len(q.answer) + 1 for q in batch]
    return [tail_nll(*row) for row in zip(logits, inputs["input_ids"], sizes, strict=True)]


@torch.no_grad()
def greedy_answers(model: Any, processor: DigitsProcessor, batch: Sequence[Question]) -> list[str]:
    """The model's own answers, up to their end token."""
    inputs = to_device(processor.collate([processor(q.prompt, q.images) for q in batch], multiple_of=16), model)
    longest = max(len(q.answer) for q in batch) + 1
    tokens = model.generate(**inputs, max_new_tokens=longest, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    answers = []
    for row in tokens.tolist():
        answers.append(processor.decode(row[: row.index(END)] if END in row else row))
    return answers


def _length(q: Question, patch: int) -> int:
    """About how many tokens a question has with its answer."""
    return len(q.prompt) + len(q.answer) + sum(image.shape[0] * image.shape[1] for image in q.images) // (2 * patch) ** 2


def groups(asked: Sequence[Question], patch: int, batch_size: int = BATCH) -> list[list[int]]:
    """Which questions share a batch: of one kind, with answers of similar length, of at most `BATCH_TOKENS` tokens with padding."""
    kinds = list(dict.fromkeys(q.kind for q in asked))
    found: list[list[int]] = []
    for i in sorted(range(len(asked)), key=lambda i: (kinds.index(asked[i].kind), len(asked[i].answer), i)):
        last = found[-1] if found else []
        longest = max(_length(asked[j], patch) for j in [*last, i])
        room = len(last) < batch_size and (len(last) + 1) * longest <= BATCH_TOKENS
        if last and room and asked[last[0]].kind == asked[i].kind:
            last.append(i)
        else:
            found.append([i])
    return found


def score(model: Any, processor: DigitsProcessor, asked: Sequence[Question], batch_size: int = BATCH) -> list[Score]:
    """Score every question; the order of the result is that of the questions."""
    scores: dict[int, Score] = {}
    for index in groups(asked, processor.patch, batch_size):
        batch = [asked[i] for i in index]
        answers = greedy_answers(model, processor, batch)
        nlls = answer_nll(model, processor, batch)
        for i, q, answer, nll in zip(index, batch, answers, nlls, strict=True):
            scores[i] = Score(q.kind, answer, q.answer, accuracy(q.kind, answer, q.answer), nll)
    return [scores[i] for i in range(len(asked))]


def _by_kind(scores: Sequence[Score], values: Sequence[float]) -> dict[str, np.ndarray]:
    kinds = dict.fromkeys(s.kind for s in scores)
    return {kind: np.array([v for s, v in zip(scores, values, strict=True) if s.kind == kind]) for kind in kinds}


def summarize(scores: Sequence[Score]) -> dict[str, float]:
    """Means for each kind, and over the kinds."""
    out: dict[str, float] = {}
    for name in ("accuracy", "nll"):
        means = {k: float(v.mean()) for k, v in _by_kind(scores, [getattr(s, name) for s in scores]).items()}
        out[name] = float(np.mean(list(means.values())))
        out |= {f"{name}/{kind}": value for kind, value in means.items()}
    return out


def compare(a: Sequence[Score], b: Sequence[Score]) -> Comparison:
    """Paired difference of accuracy, resampled within each kind since the kinds weigh the same."""
    differences = _by_kind(a, [y.accuracy - x.accuracy for x, y in zip(a, b, strict=True)])
    interval = bootstrap(*differences.values())
    first, second = summarize(a)["accuracy"], summarize(b)["accuracy"]
    return Comparison(first, second, second - first, interval.low, interval.high)
