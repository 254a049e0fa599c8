"""The linears of a stored checkpoint as vLLM will have them: names, joined parts, what the config says of each, and widths.

part    a linear of the checkpoint: its tensors, the group of the config that vLLM finds for it, or none
whole   one linear of the engine: q/k/v or gate/up together, or a part alone
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmqc.check.stored import Entry, Stored
from mmqc.engines import form as forms
from mmqc.engines.names import joined, matches, renamed, renamed_target, split_by_rows, target_of
from mmqc.engines.table import Case

CODES = ("weight_packed", "qweight")  # tensors that only a quantized linear has
TOWER = re.compile(r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|image_encoder|vit)(\.|$)")
EXPERT = re.compile(r"\.experts\.\d+\.")
HEAD = "lm_head"


@dataclass(frozen=True)
class Part:
    """A linear of the checkpoint.

    Attributes:
        name, engine_name: there, and as vLLM calls it.
        entries: its tensors.
        target: what of the config means it in vLLM: a name, a pattern or a class; None: nothing does, or ``ignore`` has it.
        group: what that says.
        ignored: by the config, in vLLM.
        stored: whether its tensors are a quantized linear's.
        inputs, outputs: widths.
    """

    name: str
    engine_name: str
    entries: Mapping[str, Entry]
    target: str | None
    group: Mapping[str, Any] | None
    ignored: bool
    stored: bool
    inputs: int
    outputs: int

    @property
    def tower(self) -> bool:
        """Whether it is the vision tower's."""
        return TOWER.search(self.name) is not None

    @property
    def parameters(self) -> int:
        """Of its weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Whole:
    """A linear of the engine's."""

    name: str
    parts: tuple[Part, ...]

    @property
    def first(self) -> Part:
        """Whose scheme vLLM takes for all."""
        return self.parts[0]

    def case(self, stored: Stored, tensor_parallel: int = 1) -> Case:
        """What to ask the engine, of one of so many GPUs."""
        group = self.first.group or {}
        inputs, outputs = self.first.inputs, sum(part.outputs for part in self.parts)
        if split_by_rows(self.name):
            inputs //= tensor_parallel
        elif HEAD not in self.name:
            outputs //= tensor_parallel
        if stored.method != "compressed-tensors":
            return Case(forms.of_config(stored.quantization), stored.quantization, inputs, outputs)
        default = stored.quantization.get("format")
        config = {
            "quant_method": "compressed-tensors",
            "format": group.get("format") or default,
            "ignore": [],
            "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
        }
        return Case(forms.of_group(group, default), config, inputs, outputs)


def wholes(stored: Stored, names: Mapping[str, Any] | None) -> list[Whole]:
    """All linears of the checkpoint, quantized or not; ``names``: how vLLM's class calls and joins them."""
    config = _Config(stored, names)
    parts = {}
    for name, entries in stored.modules().items():
        part = config.part(name, entries)
        if part is not None:
            parts[part.engine_name] = part
    return [Whole(whole, tuple(parts[name] for name in of)) for whole, of in joined(parts, names).items()]


class _Config:
    """What the quantization config says of a linear, read as vLLM reads it."""

    def __init__(self, stored: Stored, names: Mapping[str, Any] | None) -> None:
        self.stored, self.names, settings = stored, names, stored.quantization
        self.groups = {
            renamed_target(target, names): group
            for group in (settings.get("config_groups") or {}).values()
            for target in group.get("targets", ())
        }
        left = settings.get("ignore") or settings.get("modules_to_not_convert") or ()
        self.ignore = [renamed_target(target, names) for target in left]

    def part(self, name: str, entries: Mapping[str, Entry]) -> Part | None:
        """The linear of that name; None of what is none."""
        sizes = _widths(self.stored, name, entries)
        if sizes is None or "embed" in name.rpartition(".")[2]:
            return None
        engine_name = renamed(name, self.names)
        is_stored = any(codes in entries for codes in CODES) or (
            "weight" in entries and (entries["weight"].dtype in ("I8", "F8_E4M3") or "weight_scale" in entries)
        )
        if self.stored.method != "compressed-tensors":
            return Part(name, engine_name, entries, "stored" if is_stored else None, None, not is_stored, is_stored, *sizes)
        ignored = any(matches(engine_name, pattern) for pattern in self.ignore)
        target = None if ignored else target_of(engine_name, list(self.groups))
        if target is not None and HEAD in engine_name and not matches(engine_name, target):
            target = None  # its class is no Linear
        group = self.groups[target] if target is not None else None
        return Part(name, engine_name, entries, target, group, ignored, is_stored, *sizes)


def _widths(stored: Stored, name: str, entries: Mapping[str, Entry]) -> tuple[int, int] | None:
    """Inputs and outputs of a linear; None where these tensors are none."""
    if "qweight" in entries and "scales" in entries:
        bits = int(stored.quantization.get("bits", stored.quantization.get("w_bit", 4)))
        rows, columns = entries["qweight"].shape
        per_word = 32 // bits
        return (rows, columns * per_word) if stored.method == "awq" else (rows * per_word, columns)
    if "weight_packed" in entries:
        packed = entries["weight_packed"]
        if packed.dtype != "I32" or len(packed.shape) != 2:  # 4-bit floats, two a byte
            return (packed.shape[1] * 2, packed.shape[0]) if len(packed.shape) == 2 else None
        if "weight_shape" in entries:
            rows, columns = (int(v) for v in stored.read(f"{name}.weight_shape"))
            return columns, rows
        group = next(iter((stored.quantization.get("config_groups") or {}).values()), {})
        bits = int((group.get("weights") or {}).get("num_bits", 4))
        return packed.shape[1] * 32 // bits, packed.shape[0]
    weight = entries.get("weight")
    return (weight.shape[1], weight.shape[0]) if weight is not None and len(weight.shape) == 2 else None
