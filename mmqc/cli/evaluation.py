"""What quantization costs: answers, perplexity and noise of one model, and of two models compared on the same data.

    accuracy     share of answers that equal the right one, case and outer space aside; ``contains`` asks for less
    nll          mean negative log-likelihood of the right answer's tokens, natural logarithm
    perplexity   exp of the mean nll of a text's tokens, in windows of the model's context
    recovery     accuracy of the quantized model over that of the float model
    SQNR         10 log10(Σ r² / Σ (r - q)²) of the logits, visual and text positions apart, in dB

Differences come with a paired bootstrap: the same questions are drawn for both models (Efron and Tibshirani 1993, chapter 13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmqc.cli.chat_data import Example, encode
from mmqc.nn.modality import attached, visual_token_ids
from mmqc.ops.nonfinite import propagate_nonfinite
from mmqc.samples.pairs import Pair, divergence
from mmqc.samples.scoring import Interval, bootstrap, recovery

Batch = dict[str, Tensor]
NEVER_RIGHT = "recovery: the model to compare with has no answer right, so there is nothing to recover"
ANOTHER_PROMPT = "nll: the chat template writes a prompt otherwise once its answer follows, so the answer's NLL is not known"
NOT_FINITE = "NaN: the model's outputs are not finite; `mmqc quantize` names a weight that is not"


@dataclass(frozen=True)
class Answer:
    """One question's outcome: what was said, what is right, and the right answer's mean NLL per token.

    Attributes:
        another_prompt: the template writes the prompt otherwise once an answer follows (it opens a thought, say): nll is NaN.
    """

    said: str
    right: str
    nll: float
    another_prompt: bool = False

    @property
    def accuracy(self) -> float:
        """1 if they agree, case and outer space aside."""
        return float(_plain(self.said) == _plain(self.right))

    @property
    def contains(self) -> float:
        """1 if the right answer is part of what was said."""
        return float(_plain(self.right) in _plain(self.said))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


@torch.no_grad()
@propagate_nonfinite()
def ask(model: Any, processor: Any, examples: Iterable[Example], max_new_tokens: int = 64) -> list[Answer]:
    """The model's greedy answer to each example, one at a time, and the NLL of the right one.

    Raises:
        ValueError: an example has no answer.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    answers = []
    for example in examples:
        if not example.answer:
            raise ValueError(f"no answer to {example.text!r}: evaluation needs one in every line")
        prompt = to_device(encode(processor, example, answer=False), model)
        size = prompt["input_ids"].shape[1]
        ids = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)[0, size:]
        said = tokenizer.decode(ids, skip_special_tokens=True)
        nll = _answer_nll(model, processor, example, prompt["input_ids"][0])
        answers.append(Answer(said, example.answer, math.nan if nll is None else nll, another_prompt=nll is None))
    return answers


def _answer_logits(model: Any, processor: Any, example: Example, prompt: Tensor) -> tuple[Tensor, Tensor] | None:
    """Logits [T, V] that predict the tokens behind the prompt [T]: the answer and what the template closes it with.

    None where the template writes another prompt once the answer follows.
    """
    whole = to_device(encode(processor, example, answer=True), model)
    ids, size = whole["input_ids"][0], len(prompt)
    if not torch.equal(ids[:size], prompt):
        return None
    return model(**whole, use_cache=False).logits[0, size - 1 : -1], ids[size:]


def _answer_nll(model: Any, processor: Any, example: Example, prompt: Tensor) -> float | None:
    found = _answer_logits(model, processor, example, prompt)
    return None if found is None else nn.functional.cross_entropy(found[0].double(), found[1]).item()


@torch.no_grad()
@propagate_nonfinite()
def pairs(
    first: Any, second: Any, processor: Any, examples: Sequence[Example], before: Sequence[Answer], after: Sequence[Answer]
) -> list[Pair]:
    """What the second model changed on each example, whose answers by both are known; KL is NaN where the NLL is."""
    found = []
    for example, a, b in zip(examples, before, after, strict=True):
        prompt = encode(processor, example, answer=False)["input_ids"][0]
        logits = [_answer_logits(model, processor, example, to_device({"": prompt}, model)[""]) for model in (first, second)]
        rows = [row[0].double().log_softmax(-1).cpu() for row in logits if row is not None]
        apart = divergence(*rows) if len(rows) == 2 else (math.nan, math.nan)
        found.append(Pair(example.kind, (a.accuracy, b.accuracy), (a.nll, b.nll), *apart))
    return found


def to_device(batch: Batch, model: nn.Module) -> Batch:
    """The batch where the model's first parameter is."""
    device = next(iter(model.parameters())).device
    return {name: value.to(device) for name, value in batch.items()}


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """Means over the questions: accuracy, contains, nll."""
    return {name: float(np.mean([getattr(a, name) for a in answers])) for name in ("accuracy", "contains", "nll")}


def compared(reference: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, Interval | float]:
    """The paired differences of ``answers`` to ``reference``, and the recovery (NaN where the reference is never right)."""
    out: dict[str, Interval | float] = {}
    for name in ("accuracy", "contains", "nll"):
        pairs = zip(reference, answers, strict=True)
        out[f"{name} difference"] = bootstrap([getattr(b, name) - getattr(a, name) for a, b in pairs])
    out["recovery"] = recovery(summary(reference)["accuracy"], summary(answers)["accuracy"])
    return out


def reasons(figures: Mapping[str, Any], answers: Iterable[Any]) -> list[str]:
    """Why some of the figures are NaN, if they are: one sentence for each cause."""
    values = {name: value.mean if isinstance(value, Interval) else value for name, value in figures.items()}
    unknown = {name for name, value in values.items() if isinstance(value, float) and math.isnan(value)}
    causes = {NEVER_RIGHT: {"recovery"}}
    if any(getattr(answer, "another_prompt", False) for answer in answers):
        causes[ANOTHER_PROMPT] = {"nll", "nll difference", "KL", "agreement"}
    found = [text for text, names in causes.items() if names & unknown]
    return found + ([NOT_FINITE] if unknown.difference(*causes.values()) else [])


@torch.no_grad()
@propagate_nonfinite()
def text_nll(model: Any, tokenizer: Any, text: str, window: int = 2048) -> tuple[float, int]:
    """Summed NLL of a text's tokens but the first of each window, and their number.

    Windows do not overlap, as in GPTQ's and AWQ's tables.
    """
    encoded = tokenizer.encode(text)
    ids = torch.as_tensor(encoded).reshape(-1)
    total, count = 0.0, 0
    for start in range(0, len(ids), window):
        part = ids[start : start + window][None]
        if part.shape[1] < 2:
            break
        logits = model(**to_device({"input_ids": part}, model), use_cache=False).logits[0, :-1]
        total += float(nn.functional.cross_entropy(logits.double().cpu(), part[0, 1:], reduction="sum"))
        count += part.shape[1] - 1
    return total, count


def perplexity(model: Any, tokenizer: Any, files: Iterable[str | Path], window: int = 2048) -> float:
    """Exp of the mean NLL over all tokens of the files.

    Raises:
        ValueError: no file has two tokens.
    """
    parts = [text_nll(model, tokenizer, Path(file).read_text(encoding="utf-8"), window) for file in files]
    tokens = sum(n for _, n in parts)
    if not tokens:
        raise ValueError("perplexity needs a text of at least two tokens")
    return math.exp(sum(total for total, _ in parts) / tokens)


@torch.no_grad()
@propagate_nonfinite()
def logit_sqnr(reference: Any, model: Any, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """SQNR of the logits against the reference's in dB, at visual and at text positions, over all batches."""
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    for batch in batches:
        want = reference(**to_device(dict(batch), reference), use_cache=False).logits.double().cpu()
        got = model(**to_device(dict(batch), model), use_cache=False).logits.double().cpu()
        visual = _visual(model, batch)
        for name, rows in (("visual", visual), ("text", ~visual)):
            signal[name] = signal.get(name, 0.0) + float(want[rows].square().sum())
            noise[name] = noise.get(name, 0.0) + float((want - got)[rows].square().sum())
    ratio = {name: (signal[name], noise[name]) for name in signal if signal[name]}
    return {name: 10 * math.log10(s / n) if n else math.inf for name, (s, n) in ratio.items()}


def _visual(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Bool [B, T]: the visual positions, by the batch's own types or the config's token ids."""
    kinds, ids = batch.get("mm_token_type_ids"), batch["input_ids"].cpu()
    if kinds is not None:
        return kinds.cpu() > 0
    context = attached(model)
    return torch.isin(ids, torch.tensor(context.visual_token_ids if context else visual_token_ids(model)))
