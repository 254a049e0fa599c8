"""Options that several commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recipe_names() -> list[str]:
    """For the shell's completion."""
    from mmqc.cli.config import recipes

    return sorted(recipes())


def sample_names() -> list[str]:
    """For the shell's completion."""
    from mmqc.samples import NAMES

    return list(NAMES)


Model = Annotated[
    str, typer.Argument(help="A shipped sample (digits-vqa, digits-vqa-stress) or a model directory.", autocompletion=sample_names)
]
Recipe = Annotated[str, typer.Option("--recipe", "-r", help="A function of mmqc.recipes.", autocompletion=recipe_names)]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="An argument of the recipe.")]
Calibration = Annotated[
    str | None,
    typer.Option("--calibration", help="A folder with data.jsonl and images; of a sample, a number of its prompts; 0: data-free."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", exists=True, help="A QuantConfig as JSON, not a recipe.")]
Data = Annotated[
    str | None, typer.Option("--data", help="A folder with data.jsonl and images; of a sample, a number: so many of its prompts.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures there, for `mmqc report`.")]
SampleName = Annotated[
    str | None, typer.Option("--sample", help="Use this sample's data with a model directory.", autocompletion=sample_names)
]
