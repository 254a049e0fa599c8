"""Whose data a command works with: the user's own, or a sample's, if the sample was asked for.

A sample is asked for by its name as the model, by ``--sample``, or by naming a directory whose model was made from one.  Nothing
here imports torch: what cannot be done is said before that takes its seconds.
"""

from __future__ import annotations

from pathlib import Path

import typer

from mmqc.cli import checks
from mmqc.cli.chat_data import DataError, read_examples
from mmqc.samples import MARK, NAMES

FORMAT = "a folder with data.jsonl, one conversation a line, and the images that it names"


def sample_of(model: str, asked: str | None) -> str | None:
    """The sample whose data goes with a model; None for a model of the user's own."""
    if asked is not None or model in NAMES:
        return asked or model
    file = Path(model) / "config.json"
    made_from = checks.read_json(file, "the config of a model").get(MARK) if file.is_file() else None
    return made_from if made_from in NAMES else None


def data_of(model: str, asked: str | None, given: str | None, option: str, default: int) -> str:
    """What a command takes: a number of the sample's prompts, as text, or the path of the user's examples.

    Args:
        model: as typed.
        asked: the value of --sample.
        given: that of ``option``; None takes the sample's first ``default``.
        option: what errors call it.
        default: how many prompts of a sample.

    Raises:
        DataError: a model of the user's own without data, or no such data, or nothing that makes tensors of it.
        BadParameter: a number below 0.
    """
    if given is not None and not _is_number(given):
        read_examples(given, 1)
        check_processor(model, asked)
        return given
    if given is not None and int(given) < 0:
        raise typer.BadParameter(f"{given}: a number of prompts, 0 or more; or a folder", param_hint=option)
    if sample_of(model, asked) is None and not (given == "0" and option == "--calibration"):
        what = f"{option} {given} counts prompts of a sample, and" if given else "this needs data:"
        raise DataError(
            f"{what} {model} is a model of your own; pass {option} path/to/data ({FORMAT}), or ask for a sample's data: "
            f"--sample {NAMES[0]}"
        )
    return given or str(default)


def processor_class(folder: str) -> str | None:
    """The Auto class of transformers that reads what turns questions into tensors, by the files of a model's directory."""
    if any((Path(folder) / name).exists() for name in ("processor_config.json", "preprocessor_config.json")):
        return "AutoProcessor"
    return "AutoTokenizer" if (Path(folder) / "tokenizer_config.json").exists() else None


def check_processor(model: str, asked: str | None) -> None:
    """Raise where nothing could turn a question into tensors.

    Raises:
        DataError: a model of the user's own has neither processor nor tokenizer.
    """
    if processor_class(model) is None and sample_of(model, asked) is None:
        raise no_processor(model)


def no_processor(model: str) -> DataError:
    """What is wrong with a model's directory that has none, and what to do."""
    return DataError(
        f"{model} has no processor and no tokenizer, so nothing can be asked of it: copy processor_config.json, "
        "preprocessor_config.json, tokenizer.json and the like from the original model's directory"
    )


def _is_number(text: str) -> bool:
    return text.lstrip("-").isdigit()
