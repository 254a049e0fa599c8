"""The command line: `mmqc demo | quantize | check | ask | eval | compare | bench | serve | explain | export | report | ...`.

Exit codes: 0 done; 1 done, and found wanting (`check`, `doctor`, `eval --min-recovery`); 2 a wrong option; 3 refused: the model,
the config or the data cannot be used, and why; 4 not enough memory; 5 an unexpected error, which may be a bug; 130 interrupted.
An error is one line; `mmqc --debug COMMAND` shows the traceback as well.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mmqc.cli.failures import OneLineErrors
from mmqc.cli.options import Calibration, ConfigFile, Data, Json, Model, Recipe, SampleName, Set
from mmqc.cli.runs import write_json
from mmqc.distributed.torchrun import first
from mmqc.errors import WANTING

if TYPE_CHECKING:
    from mmqc.config import QuantConfig
    from mmqc.samples.sample import Sample

EXIT_CODES = (__doc__ or "").partition("\n\n")[2].replace("\n", " ").strip()
app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, epilog=EXIT_CODES)
console = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 100)  # tables keep their columns in a log


def show_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        from mmqc.versions import installed

        console.print(f"mmqc {installed('mmqc') or 'not installed as a distribution'}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="MMQC_DEBUG", help="Show the traceback of an error, before its line.")
    ] = False,
) -> None:
    """A quantizing compiler for multimodal LLMs."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported; see Makefile


def wake() -> None:
    """Import what takes seconds, and say so first; what can be refused without it has been."""
    if "torch" in sys.modules:
        return
    Console(stderr=True, quiet=not first()).print("loading torch", style="dim", highlight=False)
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
    from mmqc.cli import checks

    checks.folder(out, needed=True)
    wake()
    from mmqc.cli import demo

    demo.run(demo.Options(out, questions, calibration, ablation, compiled), console)


@app.command()
def quantize(
    model: Model,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory for the model and its report.")] = None,
    recipe: Recipe = "mquant",
    w: Annotated[int | None, typer.Option("--w", help="Weight bits: the recipe's weight_bits.")] = None,
    a: Annotated[int | None, typer.Option("--a", help="Activation bits: the recipe's activation_bits.")] = None,
    settings: Set = None,
    config_file: ConfigFile = None,
    calibration: Calibration = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many examples of the folder.")] = None,
    save_format: Annotated[str | None, typer.Option("--format", help="mmqc (default) or compressed-tensors.")] = None,
    engine: Annotated[str | None, typer.Option(help="vllm==0.32 or vllm==0.33: what it takes, in its format.")] = None,
    gpu: Annotated[str, typer.Option(help="Of the engine: a100, l40s, h100, or a capability like 9.0.")] = "h100",
    float8: Annotated[bool, typer.Option("--float8", help="Static activations as float8, and weights of 8 bits too.")] = False,
    float4: Annotated[str | None, typer.Option(help="mxfp4 or nvfp4: weights of 4 bits alone as floats.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it would take.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start even if memory looks short.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is in the directory.")] = False,
    device: Annotated[str | None, typer.Option(help="Where blocks are computed, e.g. cuda; the model stays in memory.")] = None,
    resume_dir: Annotated[Path | None, typer.Option(help="Keeps finished blocks: the same command goes on there.")] = None,
    spool: Annotated[Path | None, typer.Option(help="A folder for activations that memory has no room for.")] = None,
    inputs: Annotated[str, typer.Option(help="That linears are calibrated on: float, quantized or asymmetric.")] = "float",
    sample: SampleName = None,
) -> None:
    """Quantize a model, save it, and write quantization.html and quantization.json beside it."""
    from mmqc.cli import checks, source

    checks.names(model, sample)
    if calibration is not None:
        calibration = source.data_of(model, sample, calibration, "--calibration", 0)
    checks.folder(out, needed=not dry_run, overwrite=overwrite)
    bits = [f"{key}={value}" for key, value in (("weight_bits", w), ("activation_bits", a)) if value is not None]
    config = config_of(recipe, [*bits, *(settings or [])], config_file)
    from mmqc.cli import jobs
    from mmqc.cli.config import fitted

    config = fitted(config, float8, float4, engine, gpu)
    checks.work(device, resume_dir, spool)
    checks.inputs(inputs)
    to = jobs.written_as(save_format, engine, gpu)
    if calibration is None:
        free = source.sample_of(model, sample) is None and not checks.needs_data(config) and inputs != "asymmetric"
        calibration = "0" if free else source.data_of(model, sample, None, "--calibration", 32)
    checks.calibration(calibration, config, inputs)
    if not jobs.announce(model, config, calibration, console) and not force and not dry_run:
        raise MemoryError("memory is short for this; free some, quantize on a larger machine, or pass --force")
    if dry_run or out is None:  # which is needed for all else
        return
    loaded, data = load(model, sample)
    given = ", ".join([*bits, *(settings or [])])
    called = config_file.name if config_file else f"{recipe}({given})" if given else recipe
    to_do = jobs.Target(model, out, to, calibration, limit, device, resume_dir, spool, called, inputs)
    jobs.quantize(loaded, data, config, to_do, console)


@app.command()
def ask(
    model: Model,
    question: Annotated[str, typer.Argument(help="What to ask.")],
    image: Annotated[list[Path] | None, typer.Option("--image", "-i", help="An image that it is about; several in order.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of the answer.")] = 128,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Through mmqc.compiled_loop, asked twice.")] = False,
    device: Annotated[str | None, typer.Option(help="What to compute on. Default: a GPU, where there is one.")] = None,
) -> None:
    """Ask a model one question: the answer, tokens/s, and what ran."""
    from mmqc.cli import chat_data, checks, source

    checks.names(model)
    source.check_processor(model, None)
    for path in image or ():
        chat_data.open_image(path)
    checks.work(device, None, None)
    loaded, own = load(model, None)
    import torch

    from mmqc.cli import ask, jobs

    loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    processor = jobs.processor_of(model, own)
    said = ask.ask(loaded, processor, ask.example(question, image or ()), max_new_tokens, compiled)
    console.print(said.text, markup=False, highlight=False, soft_wrap=True)
    speed = "" if said.tokens_per_s is None else f", then {said.tokens_per_s:.1f} tokens/s"
    times = f"{said.tokens} tokens: the first after {1e3 * said.first_seconds:.0f} ms{speed}"
    for line in (times, ask.ran(loaded, compiled)):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(help="A checkpoint of compressed-tensors, AWQ or GPTQ.")],
    engine: Annotated[str, typer.Option(help="vllm==0.32 or vllm==0.33.")],
    gpu: Annotated[str, typer.Option(help="a100, l40s, h100, or a capability like 9.0.")] = "h100",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that a linear is split over.")] = 1,
    linear_backend: Annotated[str, typer.Option(help="auto, or humming where the engine is started with it.")] = "auto",
    python: Annotated[str | None, typer.Option(help="Of an environment that has the engine: it is asked, not its table.")] = None,
    json_file: Json = None,
) -> None:
    """What an engine will make of a checkpoint: refused, weight-only in silence, slow, or as its config says."""
    from mmqc.check.run import check as run

    given: dict[str, Any] = {"gpu": gpu, "tensor_parallel": tensor_parallel, "linear_backend": linear_backend, "python": python}
    found = run(directory, engine, **given)
    say: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
    for finding in found.findings:
        console.print(str(finding), **say)
    for kernel, count in sorted(found.kernels.items()):
        console.print(f"{count:5} linears  {kernel}", **say)
    start = f", start it with {found.flag}" if found.flag else ""
    console.print(f"{found.share:.1%} of linear weights quantized; {engine} on {gpu}, by {found.source}{start}", **say)
    write_json(json_file, {"check": found.to_dict()})
    if not found.good:
        raise typer.Exit(WANTING)


@app.command("eval")
def evaluate(
    model: Model,
    questions: Annotated[int | None, typer.Option("--questions", "-n", min=1, help="Default: all.")] = None,
    against: Annotated[list[str] | None, typer.Option(help="The float model, or others: what MODEL changed, paired.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="A folder with data.jsonl, or a jsonl file.")] = None,
    text: Annotated[list[Path] | None, typer.Option("--text", exists=True, help="Text files: perplexity.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-evaluation-harness, e.g. mmmu_val,chartqa.")] = None,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Their prompts in the model's chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 64,
    min_recovery: Annotated[float | None, typer.Option(help="Exit with 1 below this share of the float model.")] = None,
    json_file: Json = None,
    sample: SampleName = None,
) -> None:
    """Accuracy, answer NLL, perplexity and noise of a model, on a sample, your own questions or text."""
    from mmqc.cli import checks, source

    if tasks and (against or data or text or min_recovery is not None):
        raise typer.BadParameter("the harness evaluates one model by itself", param_hint="--tasks")
    if min_recovery is not None and not against:
        raise typer.BadParameter("recovery needs the float model: --against", param_hint="--min-recovery")
    if not tasks:  # the harness takes names of the Hub too
        checks.names(model, sample)
        source.check_processor(model, sample)
    if data is not None or not (text or tasks):
        source.data_of(model, sample, None if data is None else str(data), "--data", 0)
    wake()
    from mmqc.cli import eval_job, jobs

    if tasks:
        figures = jobs.benchmarks(model, tasks.split(","), questions, chat_template, console)
        write_json(json_file, {"model": model, "data": tasks, "chat_template": chat_template, "eval": figures})
        return
    job = eval_job.Evaluation(model, tuple(against or ()), data, tuple(text or ()), questions, max_new_tokens)
    result = eval_job.evaluate(job, lambda name: load(name, sample), console)
    write_json(json_file, {"model": model, "data": str(data or ""), **result.to_dict()})
    if min_recovery is not None and not result.recovery >= min_recovery:  # NaN is not enough
        raise typer.Exit(WANTING)


@app.command()
def compare(
    model: Model,
    recipes: Annotated[str, typer.Option(help="E.g. rtn:weight_bits=8,awq,mquant:weight_bits=4.")],
    calibration: Calibration = None,
    data: Annotated[Path | None, typer.Option("--data", help="Questions: a folder with data.jsonl, or a jsonl file.")] = None,
    questions: Annotated[int | None, typer.Option("--questions", "-n", min=1, help="Default: all.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 64,
    speed: Annotated[bool, typer.Option(help="Time decoding too, compiled by the backend.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw KL over bytes there, and over speed.")] = None,
    json_file: Json = None,
    sample: SampleName = None,
) -> None:
    """One model by several recipes: what each costs against the float model, and which are on the front."""
    from mmqc.cli import checks, source

    checks.names(model, sample)
    source.check_processor(model, sample)
    given = source.data_of(model, sample, calibration, "--calibration", 32)
    source.data_of(model, sample, None if data is None else str(data), "--data", 0)
    wake()
    from mmqc.cli import compare

    found = compare.recipes_of(recipes)
    contest = compare.Contest(model, found, given, data, questions, max_new_tokens, speed, picture)
    write_json(json_file, {"compare": compare.run(contest, *load(model, sample), console)})


@app.command()
def bench(
    model: Model,
    new_tokens: Annotated[int, typer.Option(min=2, help="Decoded in each run.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="The median is reported.")] = 3,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time the compiled model too.")] = True,
    data: Data = None,
    json_file: Json = None,
    sample: SampleName = None,
) -> None:
    """Time to first token, decoding speed and size, eager and compiled by the backend."""
    given = data_of(model, sample, data, 1)
    loaded, source = load(model, sample)
    from mmqc.cli import jobs

    prompt = jobs.prompts(loaded, model, source, given, 1)[0]
    rows = jobs.bench(loaded, prompt, new_tokens, repeats, compiled, console)
    write_json(json_file, {"model": model, "bench": rows})


@app.command("warm")
def warm_up(
    model: Model,
    data: Data = None,
    device: Annotated[str | None, typer.Option(help="What to compile for. Default: a GPU, where there is one.")] = None,
    json_file: Json = None,
    sample: SampleName = None,
) -> None:
    """Compile ahead for generate with mmqc.compiled_loop: one call of each kind, into Inductor's cache on disk."""
    chosen = data_of(model, sample, data, 8)
    loaded, source = load(model, sample)
    import torch

    from mmqc.cli import evaluation, jobs

    loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    count = int(chosen) if chosen.isdigit() else 64
    given = [evaluation.to_device(p, loaded) for p in jobs.prompts(loaded, model, source, chosen, count)]
    write_json(json_file, {"warm": jobs.warm(loaded, given, console)})


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen at; any but this machine's own needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    token: Annotated[str | None, typer.Option(envvar="MMQC_TOKEN", help="What clients have to know: their api_key.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model. Default: the directory's name.")] = None,
    warm: Annotated[bool, typer.Option("--warm", help="Compile before the first request.")] = False,
    kv_bits: Annotated[int | None, typer.Option(help="Visual tokens of the KV cache in 8 or 4 bits.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Decode by mmqc.compiled_loop.")] = True,
    device: Annotated[str | None, typer.Option(help="Default: a GPU, where there is one.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer.")] = 4096,
    max_images: Annotated[int, typer.Option(min=0, help="Images of a request.")] = 16,
    max_pixels: Annotated[int, typer.Option(min=1, help="Pixels of all images of a request.")] = 32_000_000,
    max_bytes: Annotated[int, typer.Option(min=1024, help="Of a request.")] = 32 * 2**20,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests at a time; more are told to come back.")] = 64,
) -> None:
    """Answer OpenAI's clients: transformers' server around one model (`pip install 'mmqc[serve]'`)."""
    from mmqc.cli import checks
    from mmqc.cli.serving import command
    from mmqc.cli.serving.limits import Limits

    checks.names(model, "digits-vqa")
    checks.work(device, None, None)
    limits = Limits(body=max_bytes, images=max_images, pixels=max_pixels, new_tokens=max_tokens, waiting=max_waiting)
    command.serve(model, command.Options(host, port, token, name, warm, kv_bits, compiled, device, limits), console)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Output directories of `quantize`; JSON of `eval`, `bench`, `explain`.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("out/report.html"),
) -> None:
    """One self-contained page about one or several runs: quantization, evaluation, speed."""
    wake()
    from mmqc.cli.runs import page

    console.print(f"{page(runs, out)} written")


@app.command()
def explain(
    model: Model,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="Let the backend quantize with it.")] = None,
    settings: Set = None,
    config_file: ConfigFile = None,
    data: Data = None,
    sample: SampleName = None,
    json_file: Json = None,
    spaces: Annotated[bool, typer.Option("--spaces", help="The channel spaces and what becomes of them, only.")] = False,
) -> None:
    """What every pass and the lowering do with this model, on one prompt."""
    import mmqc

    given = data_of(model, sample, data, 1)
    config = config_of(recipe, settings, config_file) if recipe or config_file else None
    loaded, source = load(model, sample)
    from mmqc.cli import jobs

    batch = jobs.batch_of(model, source, given)
    if spaces:
        planned = mmqc.plan(loaded, config or mmqc.recipes.rotate(), batch)
        console.print(str(planned), markup=False, highlight=False, soft_wrap=True)
        return
    options = {"config": config} if config else None
    explanation = mmqc.explain(loaded, batch, options=options)
    console.print(str(explanation), markup=False, highlight=False, soft_wrap=True)
    write_json(json_file, {"model": model, "explain": explanation.to_dict()})


@app.command()
def export(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The package; its name ends in .pt2.")],
    program: Annotated[
        list[str] | None, typer.Option("--program", "-p", help="model, vision, prefill or decode. Default: all of them.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="A .safetensors file for the weights of all programs. Default: each has its own.")
    ] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="Quantize with it first.")] = None,
    settings: Set = None,
    config_file: ConfigFile = None,
    calibration: Calibration = None,
    data: Data = None,
    sample: SampleName = None,
) -> None:
    """Compile a model into one package that runs without Python, and compare it with the model."""
    import mmqc
    from mmqc.cli import source

    if out.suffix != ".pt2":
        raise typer.BadParameter(f"{str(out)!r}: the name of a package ends in .pt2", param_hint="OUT")
    if weights is not None and weights.suffix != ".safetensors":
        raise typer.BadParameter(f"{str(weights)!r}: the name of the file ends in .safetensors", param_hint="--weights")
    chosen = data_of(model, sample, data, 1)
    config = config_of(recipe, settings, config_file) if recipe or config_file else None
    count = "0" if config is None else source.data_of(model, sample, calibration, "--calibration", 32)
    loaded, samples = load(model, sample)
    from mmqc.cli import jobs

    example = jobs.prompts(loaded, model, samples, chosen, 1)[0]
    if config:
        mmqc.quantize_(loaded, config, calibration=jobs.calibration_of(loaded, model, samples, count))
    start = time.perf_counter()
    with console.status("exporting") as status:

        def say(text: str) -> None:
            status.update(text)
            console.print(f"{time.perf_counter() - start:6.1f} s  {text}", markup=False, highlight=False)

        mmqc.export(loaded, example, out, programs=program, weights=weights, say=say)
    console.print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")


@app.command()
def doctor(
    ctx: typer.Context,
    smoke: Annotated[bool, typer.Option(help="Compile a quantized linear and compare it with eager.")] = True,
) -> None:
    """Check this environment: versions, devices, compiler, and what would fall back."""
    wake()
    from mmqc.cli import doctor

    checks = doctor.examine(smoke)
    table = Table("", "found", "", header_style="bold")
    marks = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "problem": "[red]problem[/red]"}
    for check in checks:
        table.add_row(check.name, check.found, marks[check.status])
    console.print(table)
    for line in doctor.fallbacks(checks):
        console.print(f"  {line}", markup=False, highlight=False)
    for error in filter(None, (check.error for check in checks if ctx.find_root().params["debug"])):
        traceback.print_exception(error)
    if not doctor.sound(checks):
        raise typer.Exit(WANTING)


@app.command()
def passes(recipe: Recipe = "mquant", settings: Set = None, config_file: ConfigFile = None) -> None:
    """The passes that a recipe runs, in order, with what each needs and gives."""
    wake()
    from mmqc.pipeline import phases

    table = Table("", "phase", "pass", "exact", "needs", "gives", header_style="bold")
    table.columns[2].no_wrap = True
    found = phases(config_of(recipe, settings, config_file))
    rows = [(phase if i == 0 else "", step) for phase, steps in found.items() for i, step in enumerate(steps)]
    for number, (phase, step) in enumerate(rows):
        exact, facts = "yes" if step.exact else "no", ("\n".join(sorted(each)) for each in (step.needs, step.gives))
        table.add_row(str(number), phase, step.name, exact, *facts)
    console.print(table)


def config_of(recipe: str | None, settings: list[str] | None, file: Path | None) -> QuantConfig:
    """The config of a file, else of a recipe; imported late, so that ``--help`` waits for neither torch nor its warnings."""
    wake()
    from mmqc.cli.config import make_config, read_config

    return read_config(file) if file else make_config(recipe or "", settings or [])


def data_of(model: str, sample: str | None, given: str | None, default: int) -> str:
    """What --data means, before anything that takes seconds."""
    from mmqc.cli import checks, source

    checks.names(model, sample)
    return source.data_of(model, sample, given, "--data", default)


def load(model: str, sample: str | None) -> tuple[Any, Sample | None]:
    """The model of that name or directory, and the sample that was asked for, if one was."""
    import mmqc
    from mmqc.cli import checks, source

    checks.names(model, sample)
    name = source.sample_of(model, sample)
    wake()
    if model in mmqc.samples.NAMES:
        own = mmqc.samples.load(model)
        return own.model, own if name == model else mmqc.samples.load(name or model)
    from mmqc.cli.jobs import load_model

    return load_model(model), mmqc.samples.load(name) if name else None
