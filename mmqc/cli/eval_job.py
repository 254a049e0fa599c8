"""What `mmqc eval` does: the figures of one model, and what it changed against each of some others, question by question."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from mmqc.cli import evaluation
from mmqc.cli.asked import Asked
from mmqc.cli.jobs import processor_of
from mmqc.samples import pairs
from mmqc.samples.scoring import Interval

if TYPE_CHECKING:
    from mmqc.samples.sample import Sample

Loader = Callable[[str], "tuple[Any, Sample | None]"]


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate: a model, others to compare with, and the data (none: the sample's questions)."""

    model: str
    against: tuple[str, ...]
    data: Path | None
    text: tuple[Path, ...]
    questions: int | None
    max_new_tokens: int


@dataclass
class Result:
    """The model's own figures; of each other model the paired ones, over all questions and by kind."""

    figures: dict[str, Any] = field(default_factory=dict)
    against: dict[str, dict[str, Any]] = field(default_factory=dict)
    kinds: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Numbers for JSON: "eval" (with one other model, its paired figures too), and "against" with "by kind" for each."""
        single = next(iter(self.against.values())) if len(self.against) == 1 else {}
        against = {
            name: pairs.flat(figures) | {"by kind": {kind: pairs.flat(found) for kind, found in self.kinds.get(name, {}).items()}}
            for name, figures in self.against.items()
        }
        return {"eval": pairs.flat(self.figures | single), "against": against}

    @property
    def recovery(self) -> float:
        """The lowest; NaN where one is not known."""
        found = [figures.get("recovery", math.nan) for figures in self.against.values()]
        return math.nan if any(map(math.isnan, found)) else min(found)


def evaluate(job: Evaluation, load: Loader, console: Console) -> Result:
    """Evaluate, print the tables, and return the figures."""
    start = time.perf_counter()
    model, sample = load(job.model)
    processor = processor_of(job.model, sample)
    tokenizer = getattr(processor, "tokenizer", processor)
    asked = Asked(processor, sample, job.data, job.questions, job.max_new_tokens) if job.data or not job.text else None
    answers = asked.ask(model) if asked else []
    result = Result(dict(asked.summary(answers)) if asked else {})
    if job.text:
        result.figures["perplexity"] = evaluation.perplexity(model, tokenizer, job.text)
    for name in job.against:
        other, figures = load(name)[0], {}  # one at a time: two models are in memory
        if asked:
            before = asked.ask(other)
            found = asked.pairs(other, model, before, answers)
            figures |= asked.compared(found, before, answers) | asked.noise(other, model)
            if len({pair.kind for pair in found}) > 1:
                result.kinds[name] = pairs.by_kind(found)
        if job.text:
            figures["perplexity of the other"] = evaluation.perplexity(other, tokenizer, job.text)
        result.against[name] = figures
        result.reasons += evaluation.reasons(result.figures | figures, answers)
    if not job.against:
        result.reasons += evaluation.reasons(result.figures, answers)
    name = job.data or ", ".join(map(str, job.text)) or (sample.name if sample else "")
    _print(job, result, f"{job.model} on {name}, {time.perf_counter() - start:.1f} s", console)
    return result


def _print(job: Evaluation, result: Result, title: str, console: Console) -> None:
    several = len(job.against) > 1
    heads = [f"against {name}" for name in job.against] if several else []
    table = Table("", "value", *heads, title=title, title_justify="left")
    for key, value in result.figures.items():
        table.add_row(key, shown(key, value), *[""] * len(heads))
    for key in dict.fromkeys(key for figures in result.against.values() for key in figures):
        cells = [shown(key, figures[key]) if key in figures else "" for figures in result.against.values()]
        table.add_row(key, *(["", *cells] if several else cells))
    console.print(table)
    for name, kinds in result.kinds.items():
        _print_kinds(name, job.model, kinds, console)
    for reason in dict.fromkeys(result.reasons):
        console.print(reason, style="red", markup=False, highlight=False, soft_wrap=True)


COLUMNS = ("accuracy difference", "flips", "KL", "agreement")


def _print_kinds(name: str, model: str, kinds: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("kind", *COLUMNS, title=f"{model} against {name}, by kind of question", title_justify="left")
    for kind, figures in kinds.items():
        table.add_row(kind, *(shown(key, figures[key]) for key in COLUMNS))
    console.print(table)


def shown(key: str, value: Any) -> str:
    """A figure with its unit: shares in percent, noise in dB (as its name says), NLL and KL in nats a token."""
    if isinstance(value, Interval):
        if key == "agreement":
            return f"{100 * value.mean:.1f} % [{100 * value.low:.1f}, {100 * value.high:.1f}]"
        points = "accuracy" in key or "contains" in key
        a, b, c = (100 * v if points else v for v in (value.mean, value.low, value.high))
        return f"{a:+.1f} points [{b:+.1f}, {c:+.1f}]" if points else str(value)
    if key.endswith(", dB"):
        return f"{value:.1f}"
    if key == "recovery" and math.isnan(value):
        return "undefined"
    if any(word in key for word in ("accuracy", "contains", "recovery")):
        return f"{100 * value:.1f} %"
    if key.startswith("nll"):
        return f"{value:.4f} nats a token"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
