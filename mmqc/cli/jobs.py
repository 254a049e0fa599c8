"""What the commands of mmqc/cli/app.py do, once their options are known."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

import mmqc
from mmqc.checkpoint.engine_export import RECORD
from mmqc.checkpoint.staging import replacing, weight_files
from mmqc.cli import checks, evaluation, source
from mmqc.cli.chat_data import DataError, batches, encode, read_examples
from mmqc.cli.memory_estimate import available, estimate, per_rank
from mmqc.distributed import torchrun
from mmqc.quantization.convert import size_of

if TYPE_CHECKING:
    from mmqc.config import QuantConfig
    from mmqc.samples.sample import Sample

FORMATS = ("mmqc", "compressed-tensors")
GIGABYTE = 1e9


def load_model(directory: str | Path) -> Any:
    """The model of a directory, ready to run: a float one, one that mmqc saved, or one of another project."""
    from safetensors import SafetensorError

    config = checks.read_json(Path(directory) / "config.json", "the config of a model")
    method = (config.get("quantization_config") or {}).get("quant_method") or "mmqc"
    load = mmqc.load_quantized if method != "mmqc" else model_class(config.get("architectures"), directory).from_pretrained
    try:
        return load(directory).eval()
    except SafetensorError as error:
        raise DataError(f"{directory}: a file of its weights is damaged ({error}); copy the model again") from error


def model_class(architectures: list[str] | None, directory: str | Path) -> Any:
    """The class of transformers that a model's config names.

    Raises:
        DataError: there is none of that name.
    """
    import transformers

    name = (architectures or ["AutoModelForImageTextToText"])[0]
    if not hasattr(transformers, name):
        raise DataError(f"{directory}/config.json: transformers {transformers.__version__} has no model class {name!r}")
    return getattr(transformers, name)


def skeleton(model: str) -> Any:
    """The model without its weights, on the meta device; None for a shipped sample's name, which is small anyway."""
    import torch
    from transformers import AutoConfig

    folder = Path(model)
    if not (folder / "config.json").exists():
        folder = mmqc.samples.folder(model)
    config: Any = AutoConfig.from_pretrained(folder)
    cls = model_class(config.architectures, folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if model in mmqc.samples.NAMES else config.dtype or torch.float32)
    try:
        with torch.device("meta"):
            return getattr(cls, "from_config", cls)(config)  # one of the Auto classes, where the config names no other
    finally:
        torch.set_default_dtype(before)


def processor_of(model: str, sample: Sample | None) -> Any:
    """The processor that was saved with the model, else its tokenizer; the sample's where a sample was asked for.

    Raises:
        DataError: there is none of them.
    """
    if (name := source.processor_class(model)) is not None:
        import transformers

        return getattr(transformers, name).from_pretrained(model)
    if sample is None:
        raise source.no_processor(model)
    return sample.processor


# --- quantize ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Where a quantized model comes from and goes to, ``save_pretrained``'s words for how, the data, and where the work is done."""

    model: str
    out: Path
    written: Mapping[str, str]
    calibration: str
    limit: int | None
    device: str | None = None
    resume_dir: Path | None = None
    spool: Path | None = None
    recipe: str = ""
    inputs: str = "float"


def bytes_of(number: float) -> str:
    """E.g. "29 MB", "14.2 GB"."""
    return f"{number / GIGABYTE:.1f} GB" if number >= GIGABYTE else f"{number / 1e6:.0f} MB"


def written_as(name: str | None, engine: str | None, gpu: str) -> dict[str, str]:
    """What ``save_pretrained`` is told of the format; raises for one that is not known, before any work."""
    if name is not None and name not in FORMATS:
        raise typer.BadParameter(f"{name!r}: {' or '.join(FORMATS)}", param_hint="--format")
    if engine is None:
        return {"format": name or "mmqc"}
    if name == "mmqc":
        raise typer.BadParameter("'mmqc': with --engine it is compressed-tensors, which may be left out", param_hint="--format")
    return {"engine": engine, "gpu": gpu}


def announce(model: str, config: QuantConfig, calibration: str, console: Console) -> bool:
    """Print what will be done and what memory it takes; whether that is there for all processes of this machine."""
    console.quiet, together = not torchrun.first(), torchrun.here()
    bare = skeleton(model)
    guess, free = estimate(bare, config), available()
    shared = {ranks: per_rank(bare, config, ranks) for ranks in (2, 4, 8)}
    schemes = ", ".join(f"{tower} {scheme}" for tower, scheme in config.schemes.items()) or "nothing is quantized"
    data = f"{calibration} prompts of the sample" if calibration.isdigit() else f"the examples of {calibration}"
    rows = {
        "schemes": schemes,
        "calibration": "none" if calibration == "0" else data,
        "linears": f"up to {guess.linears}" + (f", {guess.bits:.2f} bits a weight with its scales" if guess.linears else ""),
        "weights": f"{bytes_of(guess.weights)}, quantized {bytes_of(guess.quantized)}",
        "memory": f"about {bytes_of(guess.peak)} and the activations of one prompt"
        + (f", {together} times on this machine" if together > 1 else "")
        + (f"; {bytes_of(free)} are free" if free else ""),
    }
    each = [f"about {bytes_of(size)} on each of {ranks} ranks" for ranks, size in shared.items() if size is not None]
    rows |= {"shared": ", ".join(each)} if each else {}
    for name, value in rows.items():
        console.print(f"{name:12s} {value}", markup=False, highlight=False, soft_wrap=True)
    return free is None or together * guess.peak < free


def quantize(model: Any, sample: Sample | None, config: QuantConfig, target: Target, console: Console) -> None:
    """Quantize, save, and print the summary; of several processes that torchrun has started, the first one saves and prints."""
    console.quiet = not torchrun.first()
    processor = None if target.calibration == "0" and sample is None else processor_of(target.model, sample)
    data = calibration_of(model, target.model, sample, target.calibration, target.limit)
    folders = {"resume_dir": target.resume_dir, "spool": target.spool}
    given: dict[str, Any] = {name: str(path) for name, path in folders.items() if path is not None} | {"inputs": target.inputs}
    with torchrun.process_group():
        report = mmqc.quantize_(model, config, calibration=data, device=torchrun.own_device(target.device), **given)
    if not torchrun.first():
        return
    report.recipe = target.recipe
    with replacing(target.out, weight_files()) as stage:
        mmqc.save_pretrained(model, stage, **target.written)
        _save_processor(processor, target.model, stage)
        for name in ("quantization.html", "quantization.json"):
            report.save(stage / name)
    console.print(report.summary(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"saved in {target.out}")
    if "engine" in target.written:
        serve = checks.read_json(target.out / RECORD, "what an engine runs")["serve"]
        console.print(f"serve it there with: {serve}", markup=False, highlight=False, soft_wrap=True)


def calibration_of(model: Any, name: str, sample: Sample | None, given: str, limit: int | None = None) -> list[Any] | None:
    """Calibration batches: so many of the sample's, or those of a folder; None for 0."""
    if given.isdigit() and sample is not None:
        return sample.calibration(int(given)) if int(given) else None
    if given == "0":
        return None
    examples = read_examples(given, limit)
    checks.images(model, examples, given)
    return list(batches(processor_of(name, sample), examples))


def _save_processor(processor: Any, model: str, stage: Path) -> None:
    """The processor beside the quantized model; without data, what there is of one in the model's directory."""
    if processor is None:
        with contextlib.suppress(DataError):
            processor = processor_of(model, None)
    if processor is not None and hasattr(processor, "save_pretrained"):
        processor.save_pretrained(stage)


# --- eval -------------------------------------------------------------------------------------------------------------


def benchmarks(model: str, tasks: list[str], limit: int | None, chat_template: bool, console: Console) -> dict[str, float]:
    """Metrics of lm-evaluation-harness's tasks, printed as a table."""
    from mmqc.cli.harness import harness

    figures = harness(model, tasks, limit=limit, chat_template=chat_template)
    table = Table("", "value", title=f"{model}, lm-evaluation-harness", title_justify="left")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4f}")
    console.print(table)
    return figures


# --- bench ------------------------------------------------------------------------------------------------------------


def batch_of(name: str, sample: Sample | None, data: str) -> Any:
    """One prompt with its answer, for ``model.forward``: the sample's of that number, or the first of a folder."""
    if data.isdigit() and sample is not None:
        return sample.calibration(max(1, int(data)))[-1]
    return encode(processor_of(name, sample), read_examples(data, 1)[0], answer=True)


def prompts(model: Any, name: str, sample: Sample | None, data: str, count: int) -> list[Any]:
    """Prompts for ``generate``: the sample's, or those of a folder."""
    if data.isdigit() and sample is not None:
        return sample.prompts(max(count, int(data)))[-count:]
    processor = processor_of(name, sample)
    found = [encode(processor, example, answer=False) for example in read_examples(data, count)]
    return [evaluation.to_device(batch, model) for batch in found]


def bench(
    model: Any, prompt: Mapping[str, Any], new_tokens: int, repeats: int, compiled: bool, console: Console
) -> list[dict[str, Any]]:
    """Rows of figures, printed as a table: what, time to first token, tokens per second, bytes of the weights."""
    rows = [{"how": "eager", **timed(model, prompt, new_tokens, repeats), "size": size_of(model)}]
    if compiled:
        model.compile(backend="mmqc")
        rows.append({"how": "backend mmqc", **timed(model, prompt, new_tokens, repeats), "size": rows[0]["size"]})
    table = Table("", "first token, ms", "tokens/s", "MB", title=f"batch 1, {prompt['input_ids'].shape[1]} prompt tokens")
    for row in rows:
        table.add_row(
            row["how"], f"{1e3 * row['first_token_seconds']:.1f}", f"{row['tokens_per_s']:.1f}", f"{row['size'] / 1e6:.1f}"
        )
    console.print(table)
    return rows


def timed(model: Any, prompt: Mapping[str, Any], new_tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds to the first token, and tokens per second behind it; one run before, which may compile."""
    import torch

    def seconds(tokens: int) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(**prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with torch.no_grad():
        seconds(new_tokens)
        first = statistics.median(seconds(1) for _ in range(repeats))
        whole = statistics.median(seconds(new_tokens) for _ in range(repeats))
    return {"first_token_seconds": first, "tokens_per_s": (new_tokens - 1) / max(whole - first, 1e-9)}


def warm(model: Any, given: list[Any], console: Console) -> list[dict[str, Any]]:
    """Compile one call of each kind among these prompts, printed as a table, and where that is kept."""
    from dataclasses import asdict

    from mmqc.lowering.inductor import cache_directory

    rows = [asdict(call) for call in mmqc.warm(model, given)]
    table = Table("", "first call, s", "again, s", title="compiled ahead", title_justify="left")
    for row in rows:
        table.add_row(row["kind"], f"{row['first_seconds']:.1f}", f"{row['again_seconds']:.2f}")
    console.print(table)
    console.print(
        f"kept in {cache_directory()}: the next process with these versions and this model finds it there; "
        "TORCHINDUCTOR_CACHE_DIR names another place (one under /tmp may not outlive the machine)",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    return rows
