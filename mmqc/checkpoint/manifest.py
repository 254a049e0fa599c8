"""``mmqc_manifest.json`` beside a checkpoint in the compressed-tensors format: what mmqc wrote, for ``load_quantized``.

    {"version": 1, "config": SHA-256 of config.json, "tensors": {name: "dtype:SHA-256"}, "sha256": of all this}

Other readers ignore the file.  A checkpoint without one is another project's, and is read without these checks (ADR 23).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from mmqc.checkpoint.checksum import AGAIN, CheckpointError, digest, hashes, json_digest
from mmqc.checkpoint.files import CONFIG, read_json, weight_names
from mmqc.checkpoint.signature import REWRITTEN

NAME, VERSION = "mmqc_manifest.json", 1


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint.

    Raises:
        CheckpointError, FileNotFoundError: as ``weight_names``; a file that is no safetensors.
    """
    tensors: dict[str, Tensor] = {}
    for name in weight_names(directory):
        try:
            tensors |= load_file(directory / name)
        except SafetensorError as error:
            raise CheckpointError(f"{directory / name} is damaged: {error}; {AGAIN}") from error
    return tensors


def exists(directory: Path) -> bool:
    """Whether mmqc wrote this checkpoint and left its manifest."""
    return (directory / NAME).exists()


def write(directory: Path) -> None:
    """Writes the manifest of what lies in ``directory``; tensor by tensor, so that no more than one is in memory."""
    tensors: dict[str, str] = {}
    for name in weight_names(directory):
        with safe_open(directory / name, framework="pt") as file:
            tensors |= {key: digest(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118  (safe_open is no mapping)
    _write(directory, tensors)


def renew(directory: Path) -> None:
    """Takes config.json as it is now into the manifest.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    _write(directory, read(directory)["tensors"])


def _write(directory: Path, tensors: Mapping[str, str]) -> None:
    content = {"version": VERSION, "config": _config_digest(directory), "tensors": dict(tensors)}
    rough = directory / f".{NAME}.{os.getpid()}.part"
    text = json.dumps({**content, "sha256": json_digest(content)}, indent=1, sort_keys=True)
    rough.write_text(text + "\n", encoding="utf-8")
    rough.replace(directory / NAME)


def read(directory: Path) -> dict[str, Any]:
    """The manifest.

    Raises:
        CheckpointError: it is damaged, or a newer mmqc's.
    """
    path = directory / NAME
    content = read_json(path)
    if content.pop("sha256", None) != json_digest(content):
        raise CheckpointError(
            f"{path} is damaged: its hash is not that of its content; {AGAIN}, or delete this file to load without its checks"
        )
    if content["version"] != VERSION:
        raise CheckpointError(f"{path} has version {content['version']!r}, and this mmqc reads {VERSION}; update mmqc")
    return content


def check_config(manifest: Mapping[str, Any], directory: Path) -> None:
    """Whether config.json is as it was saved.

    Raises:
        CheckpointError: it is not.
    """
    if _config_digest(directory) != manifest["config"]:
        raise CheckpointError(
            f"{directory / CONFIG} is damaged or was edited: it differs from what was saved; {AGAIN}, or, if the change is "
            f"meant, run `python -m mmqc.checkpoint.sign {directory}`, or, if another tool wrote this, delete {NAME}"
        )


def check_tensors(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Whether the tensors are those that were saved, no more and no fewer.

    Raises:
        CheckpointError: they are not; names one.
    """
    wanted, found = manifest["tensors"], hashes(tensors)
    kinds = {
        "is missing": sorted(wanted.keys() - found.keys()),
        "was not saved": sorted(found.keys() - wanted.keys()),
        "differs from what was saved": sorted(n for n in wanted.keys() & found.keys() if wanted[n] != found[n]),
    }
    for words, names in kinds.items():
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(
                f"{directory} is damaged: {names[0]}{more} {words}; {AGAIN}, or, if another tool wrote this, delete {NAME}"
            )


def _config_digest(directory: Path) -> str:
    return json_digest({k: v for k, v in read_json(directory / CONFIG).items() if k not in REWRITTEN})
