"""What a killed ``quantize_`` leaves behind, so that the next one goes on where it stopped, bit for bit.

    job.json                    what the run was asked for: digests of config, model, calibration set and options
    <unit>.safetensors          codes, scales and histograms of one finished unit (a block)
    <unit>.json                 everything else about it, and the SHA-256 of the safetensors file; written last

Each JSON file also holds the SHA-256 of its own content.  Every file is written under another name, flushed, and renamed: a file
that is there is whole.  Units are small enough that a kill costs one block; activations are not stored, finished blocks run again
to make them.  Of several ranks the first alone has the folder, and tells the others what is in it: how many there were is not kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.calibration.calibrate import InputStatistics, Range
from mmqc.calibration.measure import Loss
from mmqc.checkpoint.checksum import hashes
from mmqc.distributed.ranks import ALONE, Ranks
from mmqc.errors import MmqcError
from mmqc.report.whole_file import whole_file, write_text
from mmqc.solvers import Quantized
from mmqc.solvers.mixed import MixedQuantized, Part

VERSION = 3
DIGEST = "content sha256"


class ResumeError(MmqcError, ValueError):
    """``resume_dir`` holds another job, or damaged files: says what differs and what to do."""


def fingerprint(model: nn.Module, config: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], options: Any) -> dict[str, str]:
    """Digests of all that a result depends on, by what it is called in an error message."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flat = {f"{i}.{k}": v for i, batch in enumerate(batches) for k, v in batch.items()}
    data = hashes({k: v for k, v in flat.items() if isinstance(v, Tensor)})
    other = {k: repr(v) for k, v in flat.items() if not isinstance(v, Tensor)}
    where = str(next(model.parameters()).device.type)
    return {
        "config": _text(config),
        "model": _text(hashes(tensors)),
        "calibration set": _text([data, other]),
        "options": _text(options),
        "software": f"torch {torch.__version__}, {where}, format {VERSION}",
    }


def _text(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


@dataclasses.dataclass
class Unit:
    """What is known of a finished unit: by weight FQN, losses by module FQN."""

    solved: dict[str, Quantized] = dataclasses.field(default_factory=dict)
    seen: dict[str, InputStatistics] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    losses: dict[str, Loss] = dataclasses.field(default_factory=dict)


class Store:
    """The finished units of one job in a folder.

    Args:
        folder: made if it is not there.
        job: see ``fingerprint``; called on the first rank.
        ranks: who shares the work.

    Raises:
        ResumeError: the folder holds units of another job.
    """

    def __init__(self, folder: str | Path, job: Callable[[], Mapping[str, str]], ranks: Ranks = ALONE) -> None:
        self.folder, self.ranks = Path(folder), ranks
        if ranks.first:
            self._open(job())

    def _open(self, job: Mapping[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "job.json"
        if not path.exists():
            _write_json(path, dict(job))
        known = _read_json(path)
        differing = [name for name, value in job.items() if known.get(name) != value]
        if differing:
            raise ResumeError(
                f"resume_dir {self.folder} belongs to another job: its {differing[0]} differs; "
                "pass what that run was given, or an empty folder"
            )

    def has(self, linears: Sequence[str]) -> bool:
        """Whether this unit is finished."""
        return self.ranks.shared(lambda: self._path(linears, "json").exists())

    def save(self, linears: Sequence[str], unit: Unit) -> None:
        """Make a unit finished."""
        if self.ranks.first:
            self._save(linears, unit)

    def _save(self, linears: Sequence[str], unit: Unit) -> None:
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        about: dict[str, Any] = {"linears": list(linears), "seconds": unit.seconds, "solved": {}, "seen": {}}
        for fqn, solved in unit.solved.items():
            about["solved"][fqn] = _split_solved(solved, f"solved.{fqn}", tensors)
        for fqn, seen in unit.seen.items():
            ranges = {name: _split(r, f"seen.{fqn}.{name}", tensors) for name, r in seen.ranges.items()}
            about["seen"][fqn] = {"ranges": ranges, "rows": seen.rows, "paired": seen.paired, "row_weights": dict(seen.row_weights)}
        about["losses"] = {name: dataclasses.asdict(loss) for name, loss in unit.losses.items()}
        path = self._path(linears, "safetensors")
        with whole_file(path) as rough:
            save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, rough)
        about["sha256"] = _digest(path)
        _write_json(self._path(linears, "json"), about)

    def load(self, linears: Sequence[str], device: torch.device) -> Unit:
        """What ``save`` was given, tensors on ``device``.

        Raises:
            ResumeError: a file was changed since it was written.
        """
        return self.ranks.shared(lambda: self._load(linears, device))

    def _load(self, linears: Sequence[str], device: torch.device) -> Unit:
        from safetensors.torch import load_file

        path = self._path(linears, "safetensors")
        about = _read_json(self._path(linears, "json"))
        if not path.exists() or _digest(path) != about["sha256"]:
            raise ResumeError(f"{path} is damaged or missing; delete {path.with_suffix('.json')} to compute it again")
        tensors = {name: tensor.to(device) for name, tensor in load_file(path).items()}
        unit = Unit(seconds=about["seconds"])
        for fqn, parts in about["solved"].items():
            unit.solved[fqn] = _join_solved(parts, f"solved.{fqn}", tensors)
        for fqn, parts in about["seen"].items():
            ranges = {n: Range(**_join(r, f"seen.{fqn}.{n}", tensors, cpu=True)) for n, r in parts["ranges"].items()}
            unit.seen[fqn] = InputStatistics(ranges, rows=parts["rows"], paired=parts["paired"], row_weights=parts["row_weights"])
        unit.losses = {name: Loss(**parts) for name, parts in about["losses"].items()}
        return unit

    def _path(self, linears: Sequence[str], suffix: str) -> Path:
        digest = hashlib.sha256("\n".join(linears).encode()).hexdigest()[:12]
        return self.folder / f"{linears[0]}-{digest}.{suffix}"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    plain = json.loads(json.dumps(content))
    write_text(path, json.dumps({**plain, DIGEST: _text(plain)}, indent=1))


def _read_json(path: Path) -> dict[str, Any]:
    """What ``_write_json`` was given.

    Raises:
        ResumeError: the file was changed since.
    """
    again = "delete it to compute its unit again" if path.name != "job.json" else "delete the folder to start anew"
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ResumeError(f"{path} is damaged: no JSON ({error}); {again}") from error
    if not isinstance(content, dict) or content.pop(DIGEST, None) != _text(content):
        raise ResumeError(f"{path} is damaged, or another version of mmqc wrote it: {DIGEST!r} is not that of its content; {again}")
    return content


def _split(value: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of a dataclass: tensors go to ``tensors``, the others are returned."""
    plain = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            tensors[f"{name}.{field.name}"] = part
        else:
            plain[field.name] = part
    return plain


def _join(plain: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor], cpu: bool = False) -> dict[str, Any]:
    prefix = f"{name}."
    found = {k.removeprefix(prefix): v.cpu() if cpu else v for k, v in tensors.items() if _is_field(k, prefix)}
    return {**plain, **found}


def _split_solved(solved: Quantized, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """As ``_split``; of a mixed weight's parts, the bits are plain and the columns tensors."""
    plain = _split(solved, name, tensors)
    if isinstance(solved, MixedQuantized):
        tensors |= {f"{name}.columns.{p}": part.columns for p, part in enumerate(solved.parts)}
        plain["parts"] = [part.bits for part in solved.parts]
    return plain


def _join_solved(plain: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> Quantized:
    fields = _join(plain, name, tensors)
    if "parts" not in fields:
        return Quantized(**fields)
    parts = (Part(tensors[f"{name}.columns.{p}"].cpu(), bits) for p, bits in enumerate(fields.pop("parts")))
    return MixedQuantized(**fields, parts=tuple(parts))


def _is_field(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and "." not in key.removeprefix(prefix)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
