"""What other packages call things, where their versions differ or promise nothing: looked up here, and nowhere else.

    transformers    to 5.23 a model takes and returns its cache as ``past_key_values``, from 5.24 on as ``cache``;
                    from 5.23 on its output holds those of its encoders too (``ENCODERS``)
    private names   ``find("transformers.cache_utils:get_layer_types_and_kwargs", needed="...")``

Inductor's private names are in `mmqc/lowering/inductor.py`, which has reasons of its own.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mmqc.errors import MmqcError

CACHE_RENAMED = (5, 24)
ENCODERS = ("image_outputs", "video_outputs", "audio_outputs")
TABLE = "docs/results/versions.md"


class MovedError(MmqcError, ImportError):
    """A private name of another package is not where it was in any version that was tried: says which, what for, what to do."""


def numbers(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    parts: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def installed(package: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find(*places: str, needed: str) -> Any:
    """The first of these names that is there.

    Args:
        places: "module:name", the newest first.
        needed: what for, for the message.

    Raises:
        MovedError: there is none.
    """
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    package = places[0].partition(".")[0]
    raise MovedError(
        f"{package} {installed(package) or '(not installed)'} has no {' or '.join(places)}, which {needed} needs: "
        f"install a version from the table in {TABLE}"
    )


@functools.cache
def cache_name() -> str:
    """The argument by which a model of transformers takes its cache, and the name by which it returns it."""
    return "cache" if numbers(installed("transformers") or "0") >= CACHE_RENAMED else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache in a model's output, or among the arguments of one; None if there is none."""
    return output.get(cache_name()) if isinstance(output, Mapping) else getattr(output, cache_name(), None)


def without_encoders(output: Any) -> Any:
    """A model's output without those of its encoders, of the same class; the output itself where it has none."""
    if not isinstance(output, Mapping) or not any(name in output for name in ENCODERS):
        return output
    kept: Any = {name: value for name, value in output.items() if name not in ENCODERS}
    return kept if type(output) is dict else type(output)(**kept)
