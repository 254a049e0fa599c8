"""Files that are there whole or not at all: a killed process or a full disk leaves the old one, or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path of the same name in a folder beside ``path``; what is written there takes its place if the block ends well.

    Args:
        path: its folder is made if it is not there; a symlink is followed; what is no file (/dev/stdout) is given back itself.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    if path.exists() and not path.is_file():  # a pipe, a terminal
        yield path
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.saving-", dir=path.parent))
    rough = folder / path.name
    try:
        yield rough
        with rough.open("rb+") as file:
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, rough)
        rough.replace(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """``path.write_text``, whole or not at all."""
    with whole_file(path) as rough:
        rough.write_text(text, encoding="utf-8")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
