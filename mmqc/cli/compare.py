"""What `mmqc compare` does: one model by several recipes, what each costs in accuracy, and which of them are on the front.

A recipe is on the front if no other has both fewer bytes and less divergence from the float model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

import mmqc
from mmqc.cli import jobs
from mmqc.cli.asked import Asked
from mmqc.cli.config import make_config
from mmqc.cli.eval_job import shown
from mmqc.quantization.convert import size_of
from mmqc.samples import pairs

if TYPE_CHECKING:
    from mmqc.config import QuantConfig
    from mmqc.samples.sample import Sample

COLUMNS = ("accuracy difference", "flips", "KL", "agreement")
NEW_TOKENS, REPEATS = 16, 3


@dataclass(frozen=True)
class Contest:
    """A model, recipes by how they were typed, the data, and whether decoding is timed."""

    model: str
    recipes: dict[str, QuantConfig]
    calibration: str
    data: Path | None
    questions: int | None
    max_new_tokens: int
    speed: bool
    picture: Path | None


def recipes_of(text: str) -> dict[str, QuantConfig]:
    """The recipes of a list: NAME or NAME:KEY=VALUE:KEY=VALUE, with commas between them.

    Raises:
        BadParameter: there is no such recipe, or it does not take that.
    """
    found = {}
    for typed in filter(None, (part.strip() for part in text.split(","))):
        name, *settings = typed.split(":")
        found[typed] = make_config(name, settings)
    if not found:
        raise typer.BadParameter("name at least one, e.g. rtn:weight_bits=8,mquant:weight_bits=4", param_hint="--recipes")
    return found


def front(rows: Sequence[tuple[float, float]]) -> list[int]:
    """Which of these (cost, loss) no other undercuts in one and matches in the other, cheapest first."""
    ahead = [
        i for i, (cost, loss) in enumerate(rows) if not any(c <= cost and k <= loss and (c, k) != (cost, loss) for c, k in rows)
    ]
    return sorted(ahead, key=lambda i: rows[i])


def run(contest: Contest, model: Any, sample: Sample | None, console: Console) -> dict[str, Any]:
    """Quantize a copy by each recipe, ask it, and print the table; {"recipes": rows, "front": names}."""
    asked = Asked(jobs.processor_of(contest.model, sample), sample, contest.data, contest.questions, contest.max_new_tokens)
    batches = jobs.calibration_of(model, contest.model, sample, contest.calibration)
    before = asked.ask(model)
    rows = [{"recipe": "float", "bytes": size_of(model), **asked.summary(before), **_speed(contest, model, sample)}]
    figures: list[dict[str, Any]] = [{}]
    for typed, config in contest.recipes.items():
        quantized = copy.deepcopy(model)
        mmqc.quantize_(quantized, config, calibration=batches, progress=False)
        after = asked.ask(quantized)
        figures.append(asked.compared(asked.pairs(model, quantized, before, after), before, after))
        speed = _speed(contest, quantized, sample)
        rows.append({"recipe": typed, "bytes": size_of(quantized), **asked.summary(after), **pairs.flat(figures[-1]), **speed})
        console.print(f"{typed}: {shown('KL', figures[-1]['KL'])} nats a token", markup=False, highlight=False)
    ahead = [rows[1 + i]["recipe"] for i in front([(row["bytes"], row["KL"]) for row in rows[1:]])]
    _print(contest, rows, figures, ahead, console)
    if contest.picture is not None:
        from mmqc.report.fronts import write_front

        write_front(contest.picture, rows, ahead)
        console.print(f"{contest.picture} written")
    return {"recipes": rows, "front": ahead}


def _speed(contest: Contest, model: Any, sample: Sample | None) -> dict[str, float]:
    """Time to the first token and tokens a second, compiled by the backend, if that was asked for."""
    if not contest.speed:
        return {}
    data = str(contest.data) if contest.data is not None else "1"
    prompt = jobs.prompts(model, contest.model, sample, data, 1)[0]
    timed = copy.deepcopy(model)
    timed.compile(backend="mmqc")
    return jobs.timed(timed, prompt, NEW_TOKENS, REPEATS)


def _print(contest: Contest, rows: list[dict[str, Any]], figures: list[dict[str, Any]], ahead: list[str], console: Console) -> None:
    heads = ["MB", "accuracy", *COLUMNS, *(["tokens/s"] if contest.speed else []), "front"]
    table = Table("recipe", *heads, title=f"{contest.model} by recipe", title_justify="left")
    table.columns[0].no_wrap = True
    for row, found in zip(rows, figures, strict=True):
        cells = [f"{row['bytes'] / 1e6:.1f}", shown("accuracy", row["accuracy"])]
        cells += [shown(key, found[key]) if found else "" for key in COLUMNS]
        cells += [f"{row['tokens_per_s']:.1f}"] if contest.speed else []
        table.add_row(row["recipe"], *cells, "*" if row["recipe"] in ahead else "")
    console.print(table)
    console.print(f"on the front of KL over bytes: {', '.join(ahead)}", markup=False, highlight=False, soft_wrap=True)
