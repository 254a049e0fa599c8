"""The job of `make demo`: a trained model quantized three ways, what each way costs, and the answers it gives.

Everything goes through the public API. Pages and questions are those of the sample's evaluation: neither training nor
calibration has seen their handwriting.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mmqc
from mmqc.quantization.convert import size_of

if TYPE_CHECKING:
    from rich.console import Console

    from mmqc.report.report import QuantReport
    from mmqc.samples.sample import Sample
    from mmqc.samples.scoring import Score

FLOAT = "float"
COMPILED = "mquant w8a8"
CACHE, CACHE_PROMPTS = "calibquant, 1-bit cache", 2
SHOWN = 6


@dataclass(frozen=True)
class Options:
    """What to run: how many questions and calibration prompts, where the report goes, and which parts to leave out."""

    out: Path = Path("out")
    questions: int = 150
    calibration: int = 32
    ablation: bool = True
    compile: bool = True


@dataclass
class Outcome:
    """One model: how it scored, how large it is, how long quantization took."""

    name: str
    model: Any
    scores: list[Score]
    summary: dict[str, float]
    seconds: float = 0.0
    report: QuantReport | None = None

    def row(self, reference: Outcome) -> dict[str, Any]:
        """The line of the table; recovery is accuracy as a share of the reference's."""
        from mmqc.samples.scoring import recovery

        accuracies = {k: v for k, v in self.summary.items() if k.startswith("accuracy")}
        return {
            "model": self.name,
            **accuracies,
            "recovery": recovery(reference.summary["accuracy"], self.summary["accuracy"]),
            "nll": self.summary["nll"],
            "size": size_of(self.model),
            "seconds": self.seconds,
        }


@dataclass
class Result:
    """Everything the demo found, as `mmqc.report.html.write_html` takes it."""

    table: list[dict[str, Any]] = field(default_factory=list)
    ablation: list[dict[str, Any]] = field(default_factory=list)
    reports: dict[str, QuantReport] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    kernels: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def configs() -> dict[str, Any]:
    """The three recipes of the table."""
    return {
        "rtn w8a8, one scale": mmqc.recipes.rtn(8, activation_bits=8),
        COMPILED: mmqc.recipes.mquant(weight_bits=8),
        "mquant w4a8": mmqc.recipes.mquant(weight_bits=4),
    }


def ablation_configs() -> dict[str, Any]:
    """MQuant's ingredients, one more in each step (table 5 of the paper), at 4-bit weights."""
    steps = {
        "static": {},
        "+ MSQ": {"msq": True},
        "+ LN→RMSNorm, rotation": {"msq": True, "rotate": True},
        "+ RMS": {"msq": True, "rotate": True, "suppress": True},
    }
    off = {"msq": False, "rotate": False, "suppress": False}
    return {name: mmqc.recipes.mquant(weight_bits=4, **(off | switches)) for name, switches in steps.items()}


def run(options: Options, console: Console) -> Result:
    """Run the demo, print its tables and answers, and write `report.html`."""
    from mmqc.compiler.record import collect_records
    from mmqc.explain import Explanation

    start = time.perf_counter()
    result = Result()
    sample = mmqc.samples.load("digits-vqa")
    with Steps(console, options.ablation) as steps:
        outcomes = measure(sample, configs(), options.questions, options.calibration, steps)
        cache = packed_cache(sample, options.calibration, steps)
        base = outcomes[0]
        result.table = [outcome.row(base) for outcome in outcomes]
        print_table(console, f"digits-vqa, {options.questions} questions about unseen handwriting", result.table)
        result.reports = {o.name: o.report for o in outcomes if o.report is not None} | {CACHE: cache}
        result.examples = examples(sample.questions(options.questions), base, outcomes[-1])
        if options.ablation:
            stress = mmqc.samples.load("digits-vqa-stress")
            stressed = measure(stress, ablation_configs(), options.questions, options.calibration, steps)
            result.ablation = [outcome.row(stressed[0]) for outcome in stressed]
            print_table(console, "digits-vqa-stress, W4A8, MQuant step by step", result.ablation)
    if options.compile:
        chosen = next(o for o in outcomes if o.name == COMPILED)
        with collect_records() as graphs:
            result.answers = compiled_answers(sample, chosen.model, console)
        result.kernels = {COMPILED: Explanation(graphs).to_dict()}
    result.seconds = time.perf_counter() - start
    path = write(options.out / "report.html", result)
    console.print(f"{path} written; {result.seconds:.0f} s in all")
    return result


class Steps:
    """A progress bar over the steps of the demo, two per quantized model and one per float model."""

    def __init__(self, console: Console, ablation: bool) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:44s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        total = 2 + 2 * len(configs()) + (1 + 2 * len(ablation_configs()) if ablation else 0)
        self.task = self.progress.add_task("", total=total)

    def __enter__(self) -> Steps:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, what: str, work: Callable[[], Any]) -> tuple[Any, float]:
        """Do `work` as one step called `what`; its result and its seconds."""
        self.progress.update(self.task, description=what)
        start = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - start
        self.progress.advance(self.task)
        if not self.progress.console.is_terminal:
            self.progress.console.print(f"{what}: {seconds:.1f} s")
        return result, seconds


def measure(sample: Sample, recipes: dict[str, Any], questions: int, calibration: int, steps: Steps) -> list[Outcome]:
    """The float model and one quantized copy per recipe, each scored on the same questions."""
    from mmqc.samples.scoring import summarize

    batches = list(sample.calibration(calibration))

    def scored(name: str, model: Any, report: QuantReport | None = None, seconds: float = 0.0) -> Outcome:
        scores, _ = steps(f"{sample.name}: ask {name}", lambda: sample.scores(model, questions))
        return Outcome(name, model, scores, summarize(scores), seconds, report)

    outcomes = [scored(FLOAT, sample.model)]
    for name, config in recipes.items():
        model = copy.deepcopy(sample.model)
        work = lambda m=model, c=config: mmqc.quantize_(m, c, calibration=batches, progress=False)  # noqa: E731
        report, seconds = steps(f"{sample.name}: quantize, {name}", work)
        outcomes.append(scored(name, model, report, seconds))
    return outcomes


def packed_cache(sample: Sample, calibration: int, steps: Steps) -> QuantReport:
    """A copy of the float model with a 1-bit visual cache, ranges in full as in the paper: the page draws its scores."""
    model, batches = copy.deepcopy(sample.model), list(sample.calibration(min(calibration, CACHE_PROMPTS)))
    config = mmqc.recipes.calibquant(1, shrink_keys=1.0, shrink_values=1.0, search="layer")
    work = lambda: mmqc.quantize_(model, config, calibration=batches, progress=False)  # noqa: E731
    return steps(f"{sample.name}: search tau, {CACHE}", work)[0]


def examples(questions: Sequence[Any], float_: Outcome, quantized: Outcome) -> list[dict[str, Any]]:
    """Questions with both models' answers: those where they differ first, then one of each kind."""
    rows = list(zip(questions, float_.scores, quantized.scores, strict=True))
    differ = [row for row in rows if row[1].answer != row[2].answer][: SHOWN // 2]
    kinds = {row[0].kind: row for row in reversed(rows)}
    picked = [*differ, *(row for row in kinds.values() if all(row is not d for d in differ))][: 2 * SHOWN]
    return [
        {"images": q.images, "question": q.question, "answer": q.answer, "float": a.answer, "quantized": b.answer}
        for q, a, b in picked
    ]


def compiled_answers(sample: Sample, model: Any, console: Console) -> list[dict[str, Any]]:
    """Compile the model with our backend and let it answer questions about unseen pages, one at a time."""
    from rich.markup import escape

    fast = copy.deepcopy(model)
    fast.compile(backend="mmqc")
    console.print(f"\n[bold]{COMPILED}, compiled[/bold] (backend='mmqc'); the first answers include compilation")
    answers = []
    for question in sample.questions(SHOWN):
        prompt = sample.processor(question.prompt, question.images)
        start = time.perf_counter()
        ids = fast.generate(**prompt, max_new_tokens=len(question.answer) + 1, do_sample=False)
        seconds = time.perf_counter() - start
        answer = sample.processor.decode(ids[0, prompt["input_ids"].shape[1] :])
        mark = "[green]right[/green]" if answer == question.answer else f"[red]not {question.answer}[/red]"
        console.print(f"  {question.question} [bold]{escape(answer)}[/bold] {mark}, {seconds:.1f} s", soft_wrap=True)
        answers.append({"question": question.question, "answer": answer, "truth": question.answer, "seconds": seconds})
    return answers


HEADINGS = {"model": "", "accuracy": "all", "recovery": "recov.", "size": "MB", "seconds": "quant. s"}


def print_table(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table: accuracies and recovery in percent, sizes in megabytes, quantization in seconds."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"{title}; accuracy and recovery in %", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for key in rows[0]:
        heading = HEADINGS.get(key, key.removeprefix("accuracy/"))
        table.add_column(heading, justify="left" if key == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(key, value) for key, value in row.items()))
    console.print()
    console.print(table)


def cell(key: str, value: Any) -> str:
    """One value of the table as text."""
    if key == "size":
        return f"{value / 1e6:.1f}"
    if key == "seconds":
        return f"{value:.0f}" if value else "-"
    if key == "nll":
        return f"{value:.3f}"
    return f"{100 * value:.1f}" if isinstance(value, float) else str(value)


def write(path: Path, result: Result) -> Path:
    """The page with the tables, the plots and the examples."""
    from mmqc.cli.doctor import environment
    from mmqc.report.html import write_html

    data = {
        "title": "mmqc demo: digits-vqa",
        "table": result.table,
        "ablation": result.ablation,
        "reports": result.reports,
        "shown": list(configs())[-1],
        "examples": result.examples,
        "answers": result.answers,
        "kernels": result.kernels,
        "environment": environment(),
    }
    return write_html(path, data)
