"""A quantized checkpoint as its files say it: the config, what every tensor is, and the modules that they belong to.

Only headers are read, and the small tensors that are asked for; a checkpoint of any size takes a moment.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from mmqc.checkpoint.checksum import CheckpointError
from mmqc.checkpoint.files import CONFIG, indexed, read_json
from mmqc.errors import MmqcError

METHODS = ("compressed-tensors", "awq", "gptq")
HEADER_BYTES = 8


class NoCheckpointError(MmqcError, ValueError):
    """A directory without a quantized checkpoint that can be looked at: says what is missing."""


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its dtype as safetensors calls it, its shape, the file it is in."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass
class Stored:
    """The files of a directory.

    Attributes:
        config: config.json.
        quantization: its ``quantization_config``, wherever it stands.
        tensors: by name.
        damage: what cannot be read, one line a file.
    """

    directory: Path
    config: dict[str, Any]
    quantization: dict[str, Any]
    tensors: dict[str, Entry] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)

    @property
    def method(self) -> str:
        """compressed-tensors, awq or gptq."""
        return self.quantization["quant_method"]

    @property
    def architecture(self) -> str:
        """The model's class."""
        return str((self.config.get("architectures") or [""])[0])

    def modules(self) -> dict[str, dict[str, Entry]]:
        """Tensors by module and by their own names."""
        found: dict[str, dict[str, Entry]] = {}
        for name, entry in self.tensors.items():
            module, _, own = name.rpartition(".")
            found.setdefault(module, {})[own] = entry
        return found

    def read(self, name: str) -> Tensor:
        """The values of a tensor."""
        with safe_open(self.directory / self.tensors[name].file, framework="pt") as file:
            return file.get_tensor(name)


def read(directory: str | Path) -> Stored:
    """What lies in ``directory``.

    Raises:
        NoCheckpointError: no config.json, no safetensors, or none that AWQ, GPTQ or compressed-tensors quantized.
    """
    directory = Path(directory)
    path = directory / CONFIG
    if not path.is_file():
        raise NoCheckpointError(f"{directory} has no {CONFIG}: name the directory of a checkpoint")
    try:
        config = read_json(path)
    except CheckpointError as error:
        raise NoCheckpointError(str(error)) from error
    nested = (config.get(part) or {} for part in ("text_config", "llm_config", "language_config"))
    quantization = config.get("quantization_config") or next((q for c in nested if (q := c.get("quantization_config"))), None)
    method = (quantization or {}).get("quant_method")
    if quantization is None or method not in METHODS:
        what = "no quantization_config" if quantization is None else f"quant_method {method!r}"
        raise NoCheckpointError(f"{path} has {what}: `mmqc check` looks at {', '.join(METHODS)}")
    stored = Stored(directory, config, quantization)
    for file in _files(stored):
        try:
            stored.tensors |= {name: Entry(e["dtype"], tuple(e["shape"]), file) for name, e in header(directory / file).items()}
        except (OSError, ValueError, KeyError, struct.error) as error:
            stored.damage.append(f"{file} cannot be read: {error}")
    if not stored.tensors and not stored.damage:
        raise NoCheckpointError(f"{directory} has no safetensors: `mmqc check` reads no other weights")
    return stored


def _files(stored: Stored) -> list[str]:
    try:
        names = indexed(stored.directory)
    except CheckpointError as error:
        stored.damage.append(str(error))
        return []
    if names is None:
        return sorted(p.name for p in stored.directory.glob("*.safetensors"))
    missing = [name for name in names if not (stored.directory / name).is_file()]
    stored.damage += [f"{name}, which the index names, is not there" for name in missing]
    return [name for name in names if name not in missing]


def header(path: Path) -> Mapping[str, Any]:
    """The header of a safetensors file.

    Raises:
        ValueError: no such header, or a file shorter than it says.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(HEADER_BYTES))
        if length > path.stat().st_size:
            raise ValueError("it is cut off, or no safetensors")
        entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    end = max((e["data_offsets"][1] for e in entries.values()), default=0)
    if HEADER_BYTES + length + end > path.stat().st_size:
        raise ValueError("it is cut off")
    return entries
