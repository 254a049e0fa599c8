"""Whether a checkpoint's tensors are those that vLLM will look for, given what its config says of each linear."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmqc.check.finding import Finding, several
from mmqc.check.linears import HEAD, Part, Whole
from mmqc.check.stored import Stored
from mmqc.engines.names import matches

FLOATS = ("F32", "F16", "BF16", "F64")


def structure(stored: Stored, wholes: Iterable[Whole]) -> Iterator[Finding]:
    """All findings of this kind."""
    wholes = list(wholes)
    parts = [part for whole in wholes for part in whole.parts]
    for line in stored.damage:
        yield Finding("error", "unloadable", str(stored.directory), f"{line}: copy or download the checkpoint again")
    yield from _joined(wholes)
    yield from _unquantized(stored, parts)
    yield from _head(stored, parts)
    yield from several(
        "error",
        "left out",
        (p.name for p in parts if p.stored and p.target is None and HEAD not in p.name),
        "its tensors are quantized and no target of the config means it, or ignore has it: vLLM finds no place for them",
    )
    wrong: dict[str, list[str]] = {}
    for part in parts:
        if part.target is not None and part.stored and (why := _tensors(stored, part)):
            wrong.setdefault(why, []).append(part.name)
    for why, names in wrong.items():
        yield from several("error", "unloadable", names, why)
    yield from _targets(stored, parts)


def _joined(wholes: Iterable[Whole]) -> Iterator[Finding]:
    """Parts of one linear that the config treats differently."""
    for whole in wholes:
        if len(whole.parts) == 1:
            continue
        names = ", ".join(p.name.rpartition(".")[2] for p in whole.parts)
        if len({p.ignored for p in whole.parts}) > 1:
            text = f"{names} are one linear in vLLM, and ignore has some of them: it refuses that; list all, or none"
            yield Finding("error", "joined", whole.name, text)
        elif len({(p.target is None, str(_scheme(p.group))) for p in whole.parts}) > 1:
            text = (
                f"{names} are one linear in vLLM, and have different schemes: it takes {whole.first.name}'s for all; give them one"
            )
            yield Finding("error", "joined", whole.name, text)


def _scheme(group: Mapping[str, Any] | None) -> Any:
    return None if group is None else {k: v for k, v in group.items() if k != "targets"}


def _unquantized(stored: Stored, parts: list[Part]) -> Iterator[Finding]:
    """Linears that the config quantizes, and whose tensors are in floating point."""
    missing = [p for p in parts if p.target is not None and not p.stored]
    tower = [p.name for p in missing if p.tower]
    hint = next((h for p in missing if (h := _unmatched_pattern(stored, p))), "")
    yield from several(
        "error",
        "tower by accident",
        tower,
        f"the config quantizes the vision tower, whose tensors are in floating point: add it to ignore{hint}",
    )
    yield from several(
        "error",
        "unloadable",
        (p.name for p in missing if not p.tower),
        f"the config quantizes it, and its tensors are in floating point: add it to ignore, or quantize it{hint}",
    )


def _unmatched_pattern(stored: Stored, part: Part) -> str:
    """A pattern that means the checkpoint's name and not the engine's, in which patterns are matched."""
    for pattern in stored.quantization.get("ignore") or ():
        names = (part.name, f"model.{part.name}")
        if pattern.startswith("re:") and any(matches(n, pattern) for n in names) and not matches(part.engine_name, pattern):
            return f"; its pattern {pattern!r} does not match {part.engine_name!r}, which is vLLM's name"
    return ""


def _head(stored: Stored, parts: list[Part]) -> Iterator[Finding]:
    for part in parts:
        if HEAD not in part.name or not part.stored:
            continue
        if part.target is None and stored.method == "compressed-tensors":
            text = "it is quantized, and in vLLM no Linear, so that the class means it not: target it as 're:.*lm_head$'"
            yield Finding("error", "head", part.name, text)
        text_config = stored.config.get("text_config") or {}
        if stored.config.get("tie_word_embeddings", text_config.get("tie_word_embeddings", False)):
            text = "it is quantized, and tie_word_embeddings makes vLLM read the embedding in its place: set that to false"
            yield Finding("error", "head", part.name, text)


def _tensors(stored: Stored, part: Part) -> str:
    """What is wrong with the shapes of a quantized linear's tensors; nothing if codes and scales fit each other."""
    if stored.method != "compressed-tensors":
        return _group_sizes(part, int(stored.quantization.get("group_size", -1) or -1)) if "scales" in part.entries else ""
    weights = (part.group or {}).get("weights") or {}
    codes = "weight_packed" if "weight_packed" in part.entries else "weight"
    return _shapes(part, weights, codes) if "weight_scale" in part.entries else ""


def _shapes(part: Part, weights: Mapping[str, Any], codes: str) -> str:
    """Whether codes and scales fit each other."""
    scale, stored = part.entries["weight_scale"].shape, part.entries[codes].shape
    if codes == "weight_packed" and part.entries[codes].dtype == "I32":
        words = -(-part.inputs * int(weights.get("num_bits", 4)) // 32)
        if stored != (part.outputs, words):
            return f"weight_packed is {list(stored)}, not {[part.outputs, words]}"
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy == "group" and size and scale != (part.outputs, -(-part.inputs // size)):
        return f"weight_scale is {list(scale)}, not {[part.outputs, -(-part.inputs // size)]}, for groups of {size}"
    if strategy == "channel" and (not scale or scale[0] != part.outputs or scale[1:] not in ((), (1,))):
        return f"weight_scale is {list(scale)}, not {[part.outputs, 1]}"
    return ""


def _group_sizes(part: Part, size: int) -> str:
    """Of AWQ and GPTQ: scales [groups, N]."""
    groups = 1 if size < 0 else -(-part.inputs // size)
    found = part.entries["scales"].shape
    return "" if found == (groups, part.outputs) else f"scales are {list(found)}, not {[groups, part.outputs]}"


def _targets(stored: Stored, parts: list[Part]) -> Iterator[Finding]:
    """Targets by name that mean no linear."""
    if stored.method != "compressed-tensors":
        return
    used = {part.target for part in parts}
    names = [p for part in parts for p in (part.name, part.engine_name)]
    for group in (stored.quantization.get("config_groups") or {}).values():
        for target in group.get("targets", ()):
            is_class = re.fullmatch(r"\w+", target) is not None
            if not is_class and target not in used and not any(matches(n, target) for n in names) and not _is_used(target, used):
                yield Finding("warning", "no such linear", target, "this target of the config means nothing: a linear is left out?")


def _is_used(target: str, used: Iterable[str | None]) -> bool:
    """Whether a renamed form of the target is in use."""
    return any(u is not None and u.rpartition(".")[2] == target.rpartition(".")[2] and u.endswith(_tail(target)) for u in used)


def _tail(target: str) -> str:
    """The last three parts of a name, which renaming leaves."""
    return ".".join(target.split(".")[-3:])
