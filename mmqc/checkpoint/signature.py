"""The signature in a config.json of mmqc's format: hashes of what decides a model's outputs and is no tensor (ADR 23).

    quantization_config.signature = {
        "quantization_config": SHA-256 of quantization_config, the signature left out,
        "config":              SHA-256 of the rest of config.json, what transformers rewrites left out,
        "generation_config":   SHA-256 of generation_config.json; null: the model has none,
    }

Layout version 2 has it; version 1, which older mmqc wrote, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmqc.checkpoint.checksum import AGAIN, CheckpointError, json_digest
from mmqc.checkpoint.files import GENERATION, indexed, read_json

KEY, SIGNATURE, SIGNED = "quantization_config", "signature", 2  # SIGNED: the first layout version that has a signature
REWRITTEN = ("transformers_version", "_name_or_path", "_commit_hash")  # by transformers, whatever the model


def config_digest(raw: Mapping[str, Any]) -> str:
    """Of a config.json, without quantization_config."""
    return json_digest({k: v for k, v in raw.items() if k != KEY and k not in REWRITTEN})


def is_ours(settings: Any) -> bool:
    """Whether this is a quantization_config that mmqc wrote, even if one of its marks is damaged."""
    if not isinstance(settings, Mapping):
        return False
    named = settings.get("quant_method") == "mmqc" or str(settings.get("requires")).startswith("mmqc")
    return named or {SIGNATURE, "hashes"} <= set(settings)


def is_signed(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is one that mmqc signs."""
    settings = raw.get(KEY)
    return isinstance(settings, Mapping) and is_ours(settings) and settings.get("version") == SIGNED


def signature(raw: Mapping[str, Any], directory: Path) -> dict[str, str | None]:
    """What the signature of a config.json in ``directory`` must be."""
    return {
        KEY: json_digest({k: v for k, v in raw[KEY].items() if k != SIGNATURE}),
        "config": config_digest(raw),
        "generation_config": _generation_digest(directory),
    }


def _generation_digest(directory: Path) -> str | None:
    path = directory / GENERATION
    if not path.exists():
        return None
    return json_digest({k: v for k, v in read_json(path).items() if k not in REWRITTEN})


def check_config(raw: Mapping[str, Any], path: Path) -> None:
    """Whether a config.json is as mmqc left it.  One that is not mmqc's, or of an older mmqc's, passes.

    Raises:
        CheckpointError: it is not, or has no signature; the index of shards beside it is damaged or leads out of the directory.
    """
    astray = [key for key, value in raw.items() if key != KEY and is_ours(value)]
    if astray:
        raise CheckpointError(f"{path} is damaged: it has {astray[0]!r} where mmqc wrote {KEY!r}; {AGAIN}")
    settings = raw.get(KEY)
    if not is_ours(settings):
        return
    assert isinstance(settings, Mapping)
    version, found = settings.get("version", 1), settings.get(SIGNATURE)
    if version == SIGNED - 1 and found is None:
        return
    if isinstance(version, int) and version > SIGNED:
        return  # MmqcConfig refuses it
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} is damaged: {KEY} has no {SIGNATURE!r}; {AGAIN}{_or_sign(path)}")
    wanted = signature(raw, path.parent)
    for name, what in ((KEY, KEY), ("config", f"something outside {KEY}")):
        if found.get(name) != wanted[name]:
            raise CheckpointError(f"{path} is damaged or was edited: {what} differs from what was saved; {AGAIN}{_or_sign(path)}")
    indexed(path.parent)  # transformers reads it next, and says little about damage


def check_generation(raw: Mapping[str, Any], directory: Path, *, required: bool) -> None:
    """Whether the generation_config.json beside a signed config.json is as mmqc left it.

    Raises:
        CheckpointError: it is not, or is gone and ``required``.
    """
    wanted = raw[KEY][SIGNATURE].get("generation_config") if is_signed(raw) else None
    if wanted is None:
        return
    path = directory / GENERATION
    found = _generation_digest(directory)
    if found is None and required:
        raise CheckpointError(f"{path} is missing; {AGAIN}{_or_sign(path)}")
    if found not in (None, wanted):
        raise CheckpointError(f"{path} is damaged or was edited: it differs from what was saved; {AGAIN}{_or_sign(path)}")


def _or_sign(path: Path) -> str:
    return f", or, if the change is meant, run `python -m mmqc.checkpoint.sign {path.parent}`"
