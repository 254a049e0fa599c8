"""What the small tensors of a checkpoint say: scales that are no scales, and experts that saw no token in calibration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from mmqc.check.finding import Finding, several
from mmqc.check.linears import EXPERT, Part, Whole
from mmqc.check.stored import Stored

LEAST = 1e-6  # of an input scale: what observers leave where nothing was observed is below it
SCALES = ("weight_scale", "scales", "input_scale")


def values(stored: Stored, wholes: Iterable[Whole]) -> Iterator[Finding]:
    """All findings of this kind."""
    bad: list[str] = []
    silent: list[str] = []
    zero: list[str] = []
    for part in (p for whole in wholes for p in whole.parts if p.stored):
        for name in SCALES:
            if name not in part.entries:
                continue
            scale = stored.read(f"{part.name}.{name}").float()
            expert = EXPERT.search(f"{part.name}.") is not None
            if name == "input_scale" and expert and (not torch.isfinite(scale).all() or bool((scale <= LEAST).any())):
                silent.append(part.name)
            elif not torch.isfinite(scale).all() or bool((scale < 0).any()) or (name == "input_scale" and bool((scale == 0).any())):
                bad.append(f"{part.name}.{name}")
            elif name != "input_scale" and bool((scale == 0).all()):
                zero.append(f"{part.name}.{name}")
    yield from several("error", "scales", bad, "it holds NaN, infinity, or no positive number: quantize again")
    yield from several("warning", "scales", zero, "it is all zero, so that the linear gives nothing but its bias")
    silent += _experts_without(stored, wholes)
    yield from several(
        "warning",
        "experts unseen",
        silent,
        "calibration routed no token to it, so its input scale says nothing: calibrate with more data, or quantize by token",
    )


def _experts_without(stored: Stored, wholes: Iterable[Whole]) -> list[str]:
    """Experts that lack the input scale that their config asks for."""
    return [part.name for whole in wholes for part in whole.parts if _expects(stored, part) and "input_scale" not in part.entries]


def _expects(stored: Stored, part: Part) -> bool:
    inputs = (part.group or {}).get("input_activations") or {}
    static = bool(inputs) and not inputs.get("dynamic") and stored.method == "compressed-tensors"
    return static and EXPERT.search(f"{part.name}.") is not None
