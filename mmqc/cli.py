"""The command line: `mmqc demo | quantize | eval | explain | export | doctor | passes`."""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmqc.config import QuantConfig
    from mmqc.samples.sample import Sample

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console(width=None if sys.stdout.isatty() else 100)  # tables keep their columns in a log

Model = Annotated[str, typer.Argument(help="A shipped sample (digits-vqa, digits-vqa-stress) or a model directory.")]
Recipe = Annotated[str, typer.Option("--recipe", "-r", help="A function of mmqc.recipes.")]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="An argument of the recipe.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", exists=True, help="A QuantConfig as JSON, not a recipe.")]
SampleName = Annotated[str, typer.Option("--sample", help="The sample whose data is used with a model directory.")]


@app.callback()
def main() -> None:
    """A quantizing compiler for multimodal LLMs."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported; see Makefile
    if "TORCH_LOGS" not in os.environ:
        import torch  # noqa: F401  (sets the levels of its loggers when it is imported)

        # Extensions that do not load, enums, and one page for each graph break, which `mmqc explain` lists.
        for name in ("torchao", "torch.utils._pytree", "torch._dynamo"):
            logging.getLogger(name).setLevel(logging.ERROR)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where report.html goes.")] = Path("out"),
    questions: Annotated[int, typer.Option(min=5, help="Questions to each model.")] = 150,
    calibration: Annotated[int, typer.Option(min=1, help="Calibration prompts.")] = 32,
    ablation: Annotated[bool, typer.Option(help="Quantize the stressed model step by step as well.")] = True,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile one model and ask it.")] = True,
) -> None:
    """Quantize a shipped model three ways, compare, ask, and write out/report.html."""
    from mmqc import demo as job

    job.run(job.Options(out, questions, calibration, ablation, compiled), console)


@app.command()
def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Directory for the quantized model and its report.")],
    recipe: Recipe = "mquant",
    settings: Set = None,
    config_file: ConfigFile = None,
    calibration: Annotated[int, typer.Option(min=0, help="Calibration prompts of the sample; 0: data-free.")] = 32,
    sample: SampleName = "digits-vqa",
) -> None:
    """Quantize a model, save it, and write quantization.html and quantization.json beside it."""
    import mmqc

    config = read_config(config_file) if config_file else make_config(recipe, settings or [])
    loaded, data = load(model, sample)
    batches = data.calibration(calibration) if calibration else None
    report = mmqc.quantize_(loaded, config, calibration=batches)
    loaded.save_pretrained(out)
    for name in ("quantization.html", "quantization.json"):
        report.save(out / name)
    console.print(report.summary(), markup=False, highlight=False)
    console.print(f"saved in {out}")


@app.command("eval")
def evaluate(
    model: Model,
    questions: Annotated[int | None, typer.Option("--questions", "-n", min=5, help="Default: all.")] = None,
    against: Annotated[str | None, typer.Option(help="Another model: the paired difference of accuracy.")] = None,
    sample: SampleName = "digits-vqa",
) -> None:
    """Accuracy of a model on a sample's questions."""
    loaded, data = load(model, sample)
    start = time.perf_counter()
    if against is None:
        figures = data.evaluate(loaded, questions)
    else:
        other, _ = load(against, sample)
        c = data.compare(other, loaded, questions)
        figures = {model: c.b, against: c.a, "difference": c.difference, "2.5 %": c.low, "97.5 %": c.high}
    table = Table("", "value", title=f"{data.name}, {time.perf_counter() - start:.1f} s", title_justify="left")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)


@app.command()
def explain(
    model: Model,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="Let the backend quantize with it.")] = None,
    settings: Set = None,
    config_file: ConfigFile = None,
    sample: SampleName = "digits-vqa",
    spaces: Annotated[
        bool, typer.Option("--spaces", help="The channel spaces and what becomes of them, only.")
    ] = False,
) -> None:
    """What every pass and the lowering do with this model, on one prompt of a sample."""
    import mmqc

    loaded, data = load(model, sample)
    config = read_config(config_file) if config_file else make_config(recipe, settings or []) if recipe else None
    if spaces:
        planned = mmqc.plan(loaded, config or mmqc.recipes.rotate(), data.calibration(1)[0])
        console.print(str(planned), markup=False, highlight=False, soft_wrap=True)
        return
    options = {"config": config} if config else None
    console.print(str(mmqc.explain(loaded, data.calibration(1)[0], options=options)), markup=False, highlight=False)


@app.command()
def export(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The package; its name ends in .pt2.")],
    program: Annotated[
        list[str] | None,
        typer.Option("--program", "-p", help="model, vision, prefill or decode. Default: all of them."),
    ] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="Quantize with it first.")] = None,
    settings: Set = None,
    config_file: ConfigFile = None,
    calibration: Annotated[int, typer.Option(min=0, help="Calibration prompts of the sample; 0: data-free.")] = 32,
    sample: SampleName = "digits-vqa",
) -> None:
    """Compile a model into one package that runs without Python, and compare it with the model."""
    import mmqc
    from mmqc.front.index_find import ExportError

    loaded, data = load(model, sample)
    config = read_config(config_file) if config_file else make_config(recipe, settings or []) if recipe else None
    if config:
        mmqc.quantize_(loaded, config, calibration=data.calibration(calibration) if calibration else None)
    start = time.perf_counter()
    with console.status("exporting") as status:

        def say(text: str) -> None:
            status.update(text)
            console.print(f"{time.perf_counter() - start:6.1f} s  {text}", markup=False, highlight=False)

        try:
            mmqc.export(loaded, data.calibration(1)[0], out, programs=program, say=say)
        except (ExportError, ValueError) as error:
            console.print(str(error), markup=False, highlight=False, style="red")
            raise typer.Exit(1) from error
    console.print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")


@app.command()
def doctor(
    smoke: Annotated[bool, typer.Option(help="Compile a quantized linear and compare it with eager.")] = True,
) -> None:
    """Check this environment: versions, devices, compiler, and what would fall back."""
    from mmqc import doctor as checkup

    checks = checkup.examine(smoke)
    table = Table("", "found", "", header_style="bold")
    marks = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "problem": "[red]problem[/red]"}
    for check in checks:
        table.add_row(check.name, check.found, marks[check.status])
    console.print(table)
    for line in checkup.fallbacks(checks):
        console.print(f"  {line}", markup=False, highlight=False)
    if not checkup.sound(checks):
        raise typer.Exit(1)


@app.command()
def passes(recipe: Recipe = "mquant", settings: Set = None, config_file: ConfigFile = None) -> None:
    """The passes that a recipe runs, in order, with what each needs and gives."""
    from mmqc.pipeline import exact_passes, quantizing_passes

    config = read_config(config_file) if config_file else make_config(recipe, settings or [])
    table = Table("", "pass", "exact", "needs", "gives", header_style="bold")
    table.columns[1].no_wrap = True
    quantizing = quantizing_passes() if config.schemes else ()
    for number, step in enumerate((*exact_passes(config), *quantizing)):
        exact = "yes" if step.exact else "no"
        table.add_row(str(number), step.name, exact, *("\n".join(sorted(facts)) for facts in (step.needs, step.gives)))
    console.print(table)


def make_config(recipe: str, settings: list[str]) -> QuantConfig:
    """The config of a recipe of `mmqc.recipes`, called with `key=value` settings."""
    import mmqc

    known = public_functions(mmqc.recipes)
    if recipe not in known:
        raise typer.BadParameter(f"{recipe!r}: the recipes are {', '.join(sorted(known))}", param_hint="--recipe")
    allowed = inspect.signature(known[recipe]).parameters
    arguments: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in allowed:
            raise typer.BadParameter(f"{setting!r}: {recipe} takes {', '.join(allowed)}, as key=value")
        arguments[key] = plain_value(value)
    try:
        return known[recipe](**arguments)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error


def public_functions(module: Any) -> dict[str, Callable[..., Any]]:
    """The functions that a module defines itself, without leading underscore."""
    members = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in members if f.__module__ == module.__name__ and not name.startswith("_")}


def plain_value(text: str) -> Any:
    """4, 0.5, true, null as JSON has them; Python's True, False and None; anything else is a string."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return text


def read_config(path: Path) -> QuantConfig:
    """A QuantConfig from its JSON, or from the quantization.json of an earlier run."""
    import mmqc

    data = json.loads(path.read_text(encoding="utf-8"))
    try:
        return mmqc.QuantConfig.from_dict(data["config"] if set(data) >= {"config", "layers"} else data)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from error


def load(model: str, sample: str) -> tuple[Any, Sample]:
    """The model of that name or directory, and the sample whose questions and calibration data go with it."""
    import mmqc
    from mmqc.samples import NAMES

    if model in NAMES:
        data = mmqc.samples.load(model)
        return data.model, data
    if sample not in NAMES:
        raise typer.BadParameter(f"{sample!r}: the samples are {', '.join(NAMES)}", param_hint="--sample")
    if not (Path(model) / "config.json").exists():
        raise typer.BadParameter(f"{model!r} is neither a sample ({', '.join(NAMES)}) nor a saved model's directory")
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(model).eval(), mmqc.samples.load(sample)


if __name__ == "__main__":
    app()
