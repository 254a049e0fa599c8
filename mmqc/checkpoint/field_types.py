"""The types of what a quantization_config holds: a wrong one is an error that names its key, before anything is built from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any

import torch

from mmqc.checkpoint.checksum import CheckpointError
from mmqc.config import ConfigError, QuantConfig
from mmqc.specs import is_a

SPEC: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("in", "out", "size", "experts", "heads", "width", "weight_bits", "group_size"), (int,)),
    **dict.fromkeys(("input_scales", "outliers", "seed"), (int,)),
    "hadamard": (bool, int),
    **dict.fromkeys(("bias", "modality", "float8", "float8_weight", "order", "centre", "weight"), (bool,)),
    **dict.fromkeys(("kind", "form", "inner"), (str,)),
    **dict.fromkeys(("widths", "stored", "names", "roles", "up", "activation", "biases"), (list, tuple)),
    **dict.fromkeys(("before", "after"), (bool, NoneType)),
    "activation_bits": (int, NoneType),
    **dict.fromkeys(("integer_scales", "zero"), (bool, str)),
    "dtype": (str, torch.dtype, NoneType),
    "eps": (int, float, NoneType),
    "gate": (list, tuple, NoneType),
    "down": (Mapping, NoneType),
    "spec": (Mapping,),
}  # of a module's spec, by key


def need(holds: bool, key: str, value: Any, what: str) -> None:
    """Refuses a value.

    Raises:
        CheckpointError: it does not hold.
    """
    if not holds:
        raise CheckpointError(f"{key} = {value!r:.80} is no {what}; was the checkpoint damaged or edited by hand?")


def check_fields(parts: Mapping[str, Any]) -> None:
    """Checks the fields of a ``MmqcConfig`` that are not None.

    Raises:
        ConfigError: ``config`` is none that this mmqc knows.
        CheckpointError: a field, or a part of one, has another type; names it.
    """
    checks: dict[str, Callable[[str, Any], None]] = {
        "config": _config,
        "modules": _modules,
        "parameters": _parameters,
        "dtype": lambda key, value: need(isinstance(value, str), key, value, "dtype's name"),
        "untied": lambda key, value: need(isinstance(value, bool), key, value, "truth value"),
        "own_names": lambda key, value: need(isinstance(value, bool), key, value, "truth value"),
        "visual_token_ids": _ids,
        "record": _record,
        "hashes": _hashes,
    }
    for name, value in parts.items():
        if value is not None:
            checks[name](f"quantization_config.{name}", value)


def _table(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    need(isinstance(value, Mapping) and all(isinstance(k, str) for k in value), key, value, "table")
    return value.items()


def _config(key: str, value: Any) -> None:
    _table(key, value)
    try:
        QuantConfig.from_dict(value)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{key} is no config: {error}; was the checkpoint damaged or edited by hand?") from error


def _modules(key: str, value: Any) -> None:
    for fqn, spec in _table(key, value):
        check_spec(f"{key}.{fqn}", spec)


def check_spec(key: str, spec: Any) -> None:
    """Checks the types in a module's spec; whether the keys are the module's, ``build_module`` knows.

    Raises:
        CheckpointError: one is another; names it.
    """
    for name, value in _table(key, spec):
        if name in SPEC:
            need(is_a(value, SPEC[name]), f"{key}.{name}", value, " or ".join(_word(t) for t in SPEC[name]))
    for name in ("widths", "stored"):
        need(all(is_a(n, (int,)) for n in spec.get(name, ())), f"{key}.{name}", spec.get(name), "list of numbers")
    for name in ("names", "roles"):
        need(all(isinstance(n, str) for n in spec.get(name, ())), f"{key}.{name}", spec.get(name), "list of names")
    for i, stack in enumerate(spec.get("up", ())):
        check_spec(f"{key}.up.{i}", stack)
    if spec.get("down") is not None:
        check_spec(f"{key}.down", spec["down"])


def _word(kind: type) -> str:
    words = {NoneType: "null", Mapping: "table", bool: "truth value", int: "number", str: "text", tuple: "list"}
    return words.get(kind, kind.__name__)


def _parameters(key: str, value: Any) -> None:
    for fqn, spec in _table(key, value):
        if spec is None:
            continue
        where = f"{key}.{fqn}"
        need(set(dict(_table(where, spec))) == {"shape", "dtype"}, where, spec, "shape and dtype")
        shape = spec["shape"]
        need(isinstance(shape, list | tuple) and all(is_a(n, (int,)) for n in shape), f"{where}.shape", shape, "list of sizes")
        need(isinstance(spec["dtype"], str), f"{where}.dtype", spec["dtype"], "dtype's name")


def _ids(key: str, value: Any) -> None:
    fits = isinstance(value, Iterable) and not isinstance(value, str | Mapping)
    need(fits and all(is_a(n, (int,)) for n in value), key, value, "list of token ids")


def _record(key: str, value: Any) -> None:
    record = dict(_table(key, value))
    for name, of, what in (
        ("passes", Mapping, "list of tables"),
        ("unseen", str, "list of names"),
        ("inside", str, "list of names"),
    ):
        part = record.get(name, [])
        need(isinstance(part, list | tuple) and all(isinstance(entry, of) for entry in part), f"{key}.{name}", part, what)

    if "changes" in record:
        changes = dict(_table(f"{key}.changes", record["changes"]))
        tables, weights = changes.get("tables"), changes.get("weights")
        fits = isinstance(tables, list | tuple) and isinstance(weights, Mapping)
        need(fits, f"{key}.changes", sorted(changes), "history of weights")


def _hashes(key: str, value: Any) -> None:
    for name, found in _table(key, value):
        need(isinstance(found, str), f"{key}.{name}", found, "hash")
