"""``python -m mmqc.checkpoint.sign DIRECTORY``: what was edited in config.json or generation_config.json is meant.

The hashes of tensors stay as they are: who changes weights loads the model and saves it again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

from mmqc.checkpoint import manifest
from mmqc.checkpoint.checksum import CheckpointError
from mmqc.checkpoint.files import CONFIG, read_json
from mmqc.checkpoint.signature import KEY, SIGNATURE, is_signed, signature


def sign(directory: str | os.PathLike[str]) -> None:
    """Signs a checkpoint's config.json and generation_config.json as they are now.

    Raises:
        CheckpointError: nothing there that mmqc signs.
        FileNotFoundError: no config.json there.
    """
    directory = Path(directory)
    raw = read_json(directory / CONFIG)
    if is_signed(raw):
        sign_config(directory, raw)
    elif manifest.exists(directory):
        manifest.renew(directory)
    else:
        raise CheckpointError(
            f"{directory} is no checkpoint that mmqc signs: older ones have no signature, load the model and save it again"
        )


def sign_config(directory: Path, raw: dict[str, Any]) -> None:
    """Writes ``raw`` with its signature as config.json; replaced in one step, so that no reader finds half of it."""
    settings = {**raw[KEY], SIGNATURE: signature(raw, directory)}
    text = json.dumps({**raw, KEY: settings}, indent=2, sort_keys=True) + "\n"
    place = (directory / CONFIG).resolve()  # through a link, as transformers writes
    rough = place.with_name(f".{CONFIG}.{os.getpid()}.part")
    rough.write_text(text, encoding="utf-8")
    shutil.copymode(place, rough)
    rough.replace(place)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    try:
        sign(parser.parse_args().directory)
    except (CheckpointError, OSError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
