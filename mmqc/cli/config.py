"""A QuantConfig from what was typed: a recipe and its settings, or a file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmqc.cli.checks import read_json

if TYPE_CHECKING:
    from mmqc.config import QuantConfig


TOWERS = "towers"  # joined by + where there are several: a comma stands between recipes


def make_config(recipe: str, settings: list[str]) -> QuantConfig:
    """The config of a recipe of `mmqc.recipes`, called with `key=value` settings; all take `towers=language` and the like."""
    known = recipes()
    if recipe not in known:
        raise typer.BadParameter(f"{recipe!r}: the recipes are {', '.join(sorted(known))}", param_hint="--recipe")
    allowed = inspect.signature(known[recipe]).parameters
    arguments: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or key not in (*allowed, TOWERS):
            raise typer.BadParameter(f"{setting!r}: {recipe} takes {', '.join((*allowed, TOWERS))}, as key=value")
        arguments[key] = plain_value(value)
    towers = arguments.pop(TOWERS, None)
    try:
        config = known[recipe](**arguments)
        return config if towers is None else config.with_towers(*str(towers).split("+"))
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--w, --a or --set" if settings else "--recipe") from error


def fitted(config: QuantConfig, float8: bool, float4: str | None, engine: str | None, gpu: str) -> QuantConfig:
    """As ``--float8``, ``--float4`` and ``--engine`` want it."""
    config = in_float8(config) if float8 else config
    config = in_float4(config, float4) if float4 is not None else config
    if engine is None:
        return config
    from mmqc.engines.limits import for_engine
    from mmqc.engines.table import capability_of
    from mmqc.specs import ConfigError

    capability_of(gpu)
    try:
        return for_engine(config, engine)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from error


def in_float8(config: QuantConfig) -> QuantConfig:
    """``--float8``."""
    try:
        return config.with_float8()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--float8") from error


def in_float4(config: QuantConfig, form: str) -> QuantConfig:
    """``--float4``."""
    try:
        return config.with_float4(form)  # pyright: ignore[reportArgumentType]  # checked there
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--float4") from error


def recipes() -> dict[str, Callable[..., QuantConfig]]:
    """The functions of mmqc.recipes that make configurations, without leading underscore."""
    import mmqc

    members = inspect.getmembers(mmqc.recipes, inspect.isfunction)
    return {name: f for name, f in members if f.__module__.startswith(mmqc.recipes.__name__) and not name.startswith("_")}


def plain_value(text: str) -> Any:
    """4, 0.5, true, null as JSON has them; Python's True, False and None; anything else is a string."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except json.JSONDecodeError:
        return text


def read_config(path: Path) -> QuantConfig:
    """A QuantConfig from its JSON, or from the quantization.json of an earlier run."""
    import mmqc

    data = read_json(path, "a QuantConfig, or the quantization.json of a run,")
    try:
        return mmqc.QuantConfig.from_dict(data["config"] if set(data) >= {"config", "layers"} else data)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from error
