"""The files of a checkpoint as names and JSON; which of them hold tensors, and that none lies elsewhere."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from mmqc.checkpoint.checksum import AGAIN, CheckpointError

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it holds no such thing.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: no JSON ({error}); {AGAIN}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: a {type(content).__name__} where an object is expected; {AGAIN}")
    return content


def indexed(directory: Path) -> list[str] | None:
    """The files that the index names; None without an index.  They may be still to come, as from the Hub.

    Raises:
        CheckpointError: a damaged index, or one that leads out of the directory.
    """
    index = directory / INDEX
    if not index.exists():
        return None
    content = read_json(index)
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} is damaged: 'weight_map' is no table of file names; {AGAIN}")
    if not isinstance(content.get("metadata", {}), dict):
        raise CheckpointError(f"{index} is damaged: 'metadata' is no table; {AGAIN}")
    names = sorted(set(places.values()))
    for name in names:
        if not _is_inside(directory, name):
            raise CheckpointError(
                f"{index} names {name!r}, which is outside of the directory; a checkpoint's files lie in its own directory: "
                f"do not trust this one, or move the file there and name it in the index"
            )
    return names


def _is_inside(directory: Path, name: str) -> bool:
    """The name is what counts: in the Hub's cache the files are symlinks to blobs elsewhere, but no folder is one."""
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or PureWindowsPath(name).drive:
        return False
    return (directory / pure).parent.resolve().is_relative_to(directory.resolve())


def weight_names(directory: Path) -> list[str]:
    """The safetensors files of a checkpoint, relative to its directory.

    Raises:
        CheckpointError: as ``indexed``; a file of the index is not there.
        FileNotFoundError: no safetensors there.
    """
    names = indexed(directory)
    for name in names or ():
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / INDEX} names {name!r}, which is not there: the checkpoint is damaged; {AGAIN}")
    if names is None:
        single = (directory / SINGLE).exists()  # other safetensors, such as an adapter's, may lie beside it
        names = [SINGLE] if single else sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise FileNotFoundError(f"{directory} has no safetensors; convert the checkpoint first (pickles are not read)")
    return names
