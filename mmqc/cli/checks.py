"""What the command line looks at before any work: names, folders, data and files, each refused with what to do about it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from mmqc.cli.chat_data import DataError, Example, read_examples
from mmqc.samples import NAMES

if TYPE_CHECKING:
    from mmqc.config import QuantConfig


def names(model: str, sample: str | None = None) -> None:
    """Raise unless ``model`` is a sample or a model's directory, and ``sample`` a sample."""
    if sample is not None and sample not in NAMES:
        raise typer.BadParameter(f"{sample!r}: the samples are {', '.join(NAMES)}", param_hint="--sample")
    if model not in NAMES and not (Path(model) / "config.json").is_file():
        why = "has no config.json" if Path(model).is_dir() else "does not exist"
        raise typer.BadParameter(f"{model!r} is neither a sample ({', '.join(NAMES)}) nor a saved model's directory: {model} {why}")


def folder(out: Path | None, needed: bool, overwrite: bool = True) -> None:
    """Raise unless ``out`` can become, or is, a directory; or it is neither given nor needed.

    What is in it is replaced only with ``overwrite``, or if somebody at a terminal says so.
    """
    if out is None:
        if needed:
            raise typer.BadParameter("a directory for the result is needed, or --dry-run", param_hint="--out")
        return
    _no_file(out, "--out")
    if not needed:
        return
    _writable(out, "--out")
    if overwrite or not out.is_dir() or not any(out.iterdir()):
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise typer.BadParameter(f"{str(out)!r} is not empty; pass --overwrite to replace the model in it", param_hint="--out")
    typer.confirm(f"{out} is not empty. Replace the model in it?", abort=True)


def _no_file(path: Path, option: str) -> None:
    if any(p.exists() and not p.is_dir() for p in (path, *path.parents)):
        raise typer.BadParameter(f"{str(path)!r} is, or lies below, a file; name a directory", param_hint=option)


def _writable(path: Path, option: str) -> None:
    """Raise unless a directory can be made or written there."""
    _no_file(path, option)
    place = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".mmqc-", dir=place)).rmdir()
    except OSError as error:
        raise typer.BadParameter(f"{place} cannot be written ({error.strerror})", param_hint=option) from error


def work(device: str | None, resume_dir: Path | None, spool: Path | None) -> None:
    """Raise where there is no such device here, or a folder for the work cannot be written."""
    if device is not None:
        import torch  # takes seconds: the other checks do without

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            why = str(error).splitlines()[0]
            raise typer.BadParameter(f"{device!r} cannot be used here: {why}", param_hint="--device") from error
    for path, option in ((resume_dir, "--resume-dir"), (spool, "--spool")):
        if path is not None:
            _writable(path, option)


def inputs(text: str) -> None:
    """Raise unless linears can be calibrated on these."""
    from mmqc.calibration.sequential import Inputs

    if text not in get_args(Inputs):
        raise typer.BadParameter(f"{text!r}: {', '.join(get_args(Inputs))}", param_hint="--inputs")


def calibration(text: str, config: QuantConfig, inputs: str = "float") -> None:
    """Raise where the calibration data cannot be read, or there is none at all for what needs some."""
    from mmqc.config import ConfigError

    if text == "0" and inputs == "asymmetric":
        raise ConfigError("--calibration 0, but --inputs asymmetric compares what the data gives: pass some, or other inputs")
    if text == "0" and needs_data(config):
        raise ConfigError(
            "--calibration 0, but this config needs data: rewrites need one prompt, static scales and gptq some dozens; "
            "pass --calibration and a folder with data.jsonl (of a sample, a number), or take a data-free recipe such as rtn"
        )
    if not text.isdigit():
        read_examples(text)


def needs_data(config: QuantConfig) -> bool:
    """Whether a config takes calibration data: to round by, or to record what it rewrites."""
    from mmqc.config import Rewrites

    return config.needs_calibration or config.rewrites != Rewrites()


def images(model: Any, examples: Sequence[Example], where: str) -> None:
    """Raise where a model that reads images would be calibrated without one.

    Raises:
        DataError: its vision tower would be left alone and its visual tokens have no scale, which nobody asked for.
    """
    from mmqc.nn.modality import visual_token_ids

    if visual_token_ids(model) and not any(example.images for example in examples):
        raise DataError(
            f"{where}: no example has an image, but {type(model).__name__} reads images: its vision tower would stay in "
            'floating point, and its visual tokens without a scale; add examples with "images": [...]'
        )


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        DataError: it is none; ``what`` says what it should have been.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no JSON ({error}); {what} is expected") from error
    if not isinstance(data, dict):
        raise DataError(f"{path} holds a JSON {type(data).__name__}, not an object; {what} is expected")
    return data
