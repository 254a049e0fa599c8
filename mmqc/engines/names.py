"""How vLLM calls the modules of a checkpoint: renamed by its model class, q/k/v and gate/up joined into one linear each.

    model.language_model.layers.0.self_attn.q_proj  ->  language_model.model.layers.0.self_attn.q_proj, part of ...qkv_proj

A target or an entry of ``ignore`` that is a name is renamed too; a pattern ("re:...") is matched with the engine's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# What the language models behind all of the classes join; a class of several models need not say it of its parts.
LANGUAGE = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ROW_SPLIT = ("o_proj", "down_proj", "out_proj", "fc2", "proj", "wo", "w2", "dense_4h_to_h", "c_proj")


def renamed(name: str, model: Mapping[str, Any] | None) -> str:
    """The engine's name of a checkpoint's module, by ``WeightsMapper``'s order: patterns, parts, beginnings, endings."""
    rules = (model or {}).get("renaming") or {}
    for pattern, new in rules.get("regex", ()):
        if re.search(pattern, name):
            name = re.sub(pattern, new, name)
    for old, new in rules.get("substr", ()):
        if old in name:
            name = name.replace(old, new, 1)
    for old, new in rules.get("prefix", ()):
        if name.startswith(old):
            name = name.replace(old, new, 1)
    for old, new in rules.get("suffix", ()):
        if name.endswith(old):
            name = new.join(name.rsplit(old, 1))
    return name


def renamed_target(target: str, model: Mapping[str, Any] | None) -> str:
    """A target as the engine reads it: names of modules are renamed, patterns and classes are not."""
    return renamed(target, model) if "." in target and not target.startswith("re:") else target


def joined(names: Iterable[str], model: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """The engine's linears, each with the checkpoint's that it is made of, in the engine's order; ``names`` are the engine's."""
    rules = {**LANGUAGE, **((model or {}).get("joined") or {})}
    parts = {part: (whole, i) for whole, of in rules.items() for i, part in enumerate(of) if part != whole}
    found: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        whole, place = parts.get(last, (last, 0))
        found.setdefault(f"{parent}.{whole}" if parent else whole, []).append((place, name))
    return {whole: [name for _, name in sorted(of)] for whole, of in found.items()}


def matches(name: str, target: str) -> bool:
    """As vLLM's ``is_equal_or_regex_match``."""
    return re.match(target.removeprefix("re:"), name) is not None if target.startswith("re:") else name == target


def target_of(name: str, targets: Sequence[str]) -> str | None:
    """The first target that means a linear: by name or pattern before the class ``Linear``."""
    by_name = next((t for t in targets if matches(name, t)), None)
    return by_name or next((t for t in targets if t in ("Linear", "LinearBase")), None)


def split_by_rows(name: str) -> bool:
    """Whether tensor parallelism splits the linear's input channels rather than its outputs."""
    return name.rpartition(".")[2] in ROW_SPLIT
